package pod

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"unsafe"
)

const (
	atFdcwd         = -100
	symlinkNoFollow = 0x100 // AT_SYMLINK_NOFOLLOW
	recursive       = 0x8000
	sysMountSetattr = 442 // on every architecture
	attrReadOnly    = 1
	maxXattrBytes   = 64 << 10
)

// readOnly changes nothing else of a mount: some of its flags may be locked.
func readOnly(path string, below bool) error {
	attr := [4]uint64{attrReadOnly}
	flags := uintptr(0)
	if below {
		flags = recursive
	}
	at, err := syscall.BytePtrFromString(path)
	if err != nil {
		return err
	}
	here := atFdcwd
	_, _, errno := syscall.Syscall6(sysMountSetattr, uintptr(here), uintptr(unsafe.Pointer(at)), flags,
		uintptr(unsafe.Pointer(&attr)), unsafe.Sizeof(attr), 0)
	if errno != 0 {
		return fmt.Errorf("mount_setattr: %s: %w", path, errno)
	}
	return nil
}

// buffer is for the one thread that makes a root: some hundred small files are copied for it.
var buffer [maxXattrBytes]byte

func copyFile(from, to string, st *syscall.Stat_t) error {
	in, err := syscall.Open(from, syscall.O_RDONLY|syscall.O_CLOEXEC|syscall.O_NOFOLLOW, 0)
	if err != nil {
		return &os.PathError{Op: "open", Path: from, Err: err}
	}
	defer syscall.Close(in)
	out, err := syscall.Open(to, syscall.O_WRONLY|syscall.O_CREAT|syscall.O_EXCL|syscall.O_CLOEXEC, 0o600)
	if err != nil {
		return &os.PathError{Op: "open", Path: to, Err: err}
	}
	defer syscall.Close(out)
	for {
		n, err := syscall.Read(in, buffer[:])
		if err != nil {
			return &os.PathError{Op: "read", Path: from, Err: err}
		}
		if n == 0 {
			return dress(from, to, st)
		}
		for part := buffer[:n]; len(part) > 0; {
			n, err := syscall.Write(out, part)
			if err != nil {
				return &os.PathError{Op: "write", Path: to, Err: err}
			}
			part = part[n:]
		}
	}
}

// dress gives a copy all but the content: the owner first, which takes bits of the mode, and the times last.
func dress(from, to string, st *syscall.Stat_t) error {
	if err := syscall.Lchown(to, int(st.Uid), int(st.Gid)); err != nil {
		return &os.PathError{Op: "chown", Path: to, Err: err}
	}
	if st.Mode&syscall.S_IFMT != syscall.S_IFLNK {
		if err := syscall.Chmod(to, st.Mode&0o7777); err != nil {
			return &os.PathError{Op: "chmod", Path: to, Err: err}
		}
		copyXattrs(from, to)
	}
	return setTimes(to, st.Atim, st.Mtim)
}

// copyXattrs copies what may be copied: labels of the system are not for a namespace to set.
func copyXattrs(from, to string) {
	if n, err := syscall.Listxattr(from, nil); err != nil || n == 0 { // as most files
		return
	}
	names := make([]byte, maxXattrBytes)
	n, err := syscall.Listxattr(from, names)
	if err != nil || n <= 0 {
		return
	}
	for name := range strings.SplitSeq(strings.TrimRight(string(names[:n]), "\x00"), "\x00") {
		if n, err := syscall.Getxattr(from, name, buffer[:]); err == nil {
			_ = syscall.Setxattr(to, name, buffer[:n], 0)
		}
	}
}

func setTimes(path string, accessed, modified syscall.Timespec) error {
	at, err := syscall.BytePtrFromString(path)
	if err != nil {
		return err
	}
	times, here := [2]syscall.Timespec{accessed, modified}, atFdcwd
	_, _, errno := syscall.Syscall6(syscall.SYS_UTIMENSAT, uintptr(here), uintptr(unsafe.Pointer(at)),
		uintptr(unsafe.Pointer(&times)), symlinkNoFollow, 0, 0)
	if errno != 0 {
		return &os.PathError{Op: "utimensat", Path: path, Err: errno}
	}
	return nil
}

// makeFolders makes what is missing on the way to a folder, in every sandbox with the same times. Whoever the commands
// run as may write to the last one.
func makeFolders(root, path string) error {
	above := root
	var st syscall.Stat_t
	if err := syscall.Stat(above, &st); err != nil {
		return &os.PathError{Op: "stat", Path: above, Err: err}
	}
	made := false
	for name := range strings.SplitSeq(strings.Trim(filepath.Clean(path), "/"), "/") {
		here := filepath.Join(above, name)
		err := os.Mkdir(here, 0o755)
		if err == nil {
			made = true
			if err := errors.Join(setTimes(here, st.Mtim, st.Mtim), setTimes(above, st.Atim, st.Mtim)); err != nil {
				return err
			}
		} else if !errors.Is(err, os.ErrExist) {
			return err
		}
		if err := syscall.Lstat(here, &st); err != nil || st.Mode&syscall.S_IFMT != syscall.S_IFDIR {
			return fmt.Errorf("workdir: %s: %s is not a folder", path, strings.TrimPrefix(here, root))
		}
		above = here
	}
	if made {
		return os.Chmod(above, openMode)
	}
	return nil
}
