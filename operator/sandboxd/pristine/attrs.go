package pristine

import (
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"unsafe"
)

// attrs is what a tenant can change on a file or folder without touching its content. Times are
// left out: emptying a folder changes them too, so they are set at every restore.
type attrs struct {
	mode, uid, gid uint32
	xattrs         string // as in entry; a label of the system is there from the start
	flags          uint32 // of chattr
}

func readAttrs(path string) (attrs, error) {
	var st syscall.Stat_t
	if err := syscall.Lstat(path, &st); err != nil {
		return attrs{}, fmt.Errorf("%s: %w", path, err)
	}
	return attrs{mode: st.Mode, uid: st.Uid, gid: st.Gid, xattrs: readXattrs(path), flags: readFlags(path)}, nil
}

const (
	getFlags = 0x80086601 // FS_IOC_GETFLAGS
	setFlags = 0x40086602 // FS_IOC_SETFLAGS
)

// readFlags returns 0 where the file system has no such flags.
func readFlags(path string) (flags uint32) {
	ioctlFlags(path, getFlags, &flags)
	return flags
}

func ioctlFlags(path string, request uintptr, flags *uint32) {
	fd, err := openQuietly(path, syscall.O_NONBLOCK)
	if err != nil {
		return
	}
	defer syscall.Close(fd)
	_, _, _ = syscall.Syscall(syscall.SYS_IOCTL, uintptr(fd), request, uintptr(unsafe.Pointer(flags)))
}

const maxXattrBytes = 64 << 10 // the most that the kernel returns

func listXattrs(path string) []string {
	if n, _ := xattrCall(syscall.SYS_LLISTXATTR, path, "", nil, 0); n == 0 {
		return nil // as most files
	}
	buffer := make([]byte, maxXattrBytes)
	n, errno := xattrCall(syscall.SYS_LLISTXATTR, path, "", buffer, 0)
	if errno != 0 || n == 0 {
		return nil
	}
	names := strings.Split(strings.TrimRight(string(buffer[:n]), "\x00"), "\x00")
	slices.Sort(names)
	return names
}

func getXattr(path, name string) string {
	buffer := make([]byte, maxXattrBytes)
	n, _ := xattrCall(syscall.SYS_LGETXATTR, path, name, buffer, 0)
	return string(buffer[:n])
}

// xattrCall is one of the calls that follow no link; only llistxattr takes no name.
func xattrCall(call uintptr, path, name string, value []byte, flags uintptr) (int, syscall.Errno) {
	at, err := syscall.BytePtrFromString(path)
	if err != nil {
		return 0, syscall.EINVAL
	}
	bytes, length := unsafe.Pointer(unsafe.SliceData(value)), uintptr(len(value))
	if call == syscall.SYS_LLISTXATTR {
		n, _, errno := syscall.Syscall(call, uintptr(unsafe.Pointer(at)), uintptr(bytes), length)
		return count(n, errno), errno
	}
	of, err := syscall.BytePtrFromString(name)
	if err != nil {
		return 0, syscall.EINVAL
	}
	n, _, errno := syscall.Syscall6(call, uintptr(unsafe.Pointer(at)), uintptr(unsafe.Pointer(of)), uintptr(bytes), length, flags, 0)
	return count(n, errno), errno
}

func count(n uintptr, errno syscall.Errno) int {
	if errno != 0 {
		return 0
	}
	return int(n)
}

// restore puts the attributes of a scratch folder back as far as the daemon may; Verify decides.
func (a attrs) restore(path string) {
	_ = syscall.Chmod(path, a.mode&0o7777) // of a volume with a group, the bit that gives it to files too
	_ = entry{xattrs: a.xattrs}.setXattrs(path)
	if flags := a.flags; readFlags(path) != flags {
		ioctlFlags(path, setFlags, &flags)
	}
}

// stamp is one entry of the upper directory. The change time cannot be set from inside, so any
// write, even one that was undone, shows.
type stamp struct {
	attrs
	inode uint64
	ctime syscall.Timespec
}

func walkUpper(root string) (map[string]stamp, error) {
	seen := map[string]stamp{}
	err := filepath.WalkDir(root, func(path string, _ fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if len(seen) > maxUpperEntries {
			return fs.SkipAll
		}
		name, _ := filepath.Rel(root, path)
		seen[name], err = stampOf(path)
		return err
	})
	return seen, err
}

// stampOf leaves out what only a change of the change time could bring.
func stampOf(path string) (stamp, error) {
	var st syscall.Stat_t
	if err := syscall.Lstat(path, &st); err != nil {
		return stamp{}, &os.PathError{Op: "lstat", Path: path, Err: err}
	}
	return stamp{attrs{mode: st.Mode, uid: st.Uid, gid: st.Gid}, st.Ino, st.Ctim}, nil
}
