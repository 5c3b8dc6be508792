package pristine

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"
	"unsafe"
)

const (
	atFdcwd         = -100
	symlinkNoFollow = 0x100   // AT_SYMLINK_NOFOLLOW
	noAccessTime    = 0x40000 // O_NOATIME, on every architecture of Linux
	// tick is more than the kernel's clock for times of files may be behind: two changes in one tick show
	// the same time, so that a change of now proves nothing about the next.
	tick = 20 * time.Millisecond
)

// entry is all of one file or folder that the next tenant may see, but for numbers that the kernel gives.
type entry struct {
	mode, uid, gid, flags uint32
	size                  int64  // of an ordinary file
	links                 uint64 // its names; of a folder they count its folders
	device                uint64 // of a device file
	target                string // of a symbolic link
	xattrs                string // name=value in hexadecimal, sorted, each ended by a space
	sum                   [sha256.Size]byte
	accessed, modified    syscall.Timespec
}

// proof is the state in which an entry was last found equal. The kernel sets the change time on every
// change, and nobody can set it: while a proof holds, the content need not be read again.
type proof struct {
	inode             uint64
	changed, modified syscall.Timespec
	accessed          syscall.Timespec
}

// fingerprint is what a tree must be: path below its root, "." for the root itself -> entry.
type fingerprint map[string]entry

// proofs belong to one place of a tree; a copy of it has its own.
type proofs map[string]proof

func takeFingerprint(root string) (fingerprint, proofs, error) {
	f, p := fingerprint{}, proofs{}
	err := walk(root, func(name string, st *syscall.Stat_t) error {
		e, err := readEntry(join(root, name), st)
		if err != nil {
			return err
		}
		f[name], p[name] = e, proofOf(st)
		return nil
	})
	return f, p, err
}

func proofOf(st *syscall.Stat_t) proof { return proof{st.Ino, st.Ctim, st.Mtim, st.Atim} }

func readEntry(path string, st *syscall.Stat_t) (entry, error) {
	e := entry{mode: st.Mode, uid: st.Uid, gid: st.Gid, xattrs: readXattrs(path), accessed: st.Atim, modified: st.Mtim}
	var err error
	switch st.Mode & syscall.S_IFMT {
	case syscall.S_IFREG:
		e.size, e.links, e.flags = st.Size, uint64(st.Nlink), readFlags(path)
		e.sum, err = sumOf(path, st.Size)
	case syscall.S_IFDIR:
		e.flags = readFlags(path)
	case syscall.S_IFLNK:
		e.target, err = os.Readlink(path)
	case syscall.S_IFCHR, syscall.S_IFBLK:
		e.device = st.Rdev
	}
	return e, err
}

const maxBuffer = 256 << 10

func sumOf(path string, size int64) (sum [sha256.Size]byte, err error) {
	fd, err := openQuietly(path, syscall.O_NONBLOCK)
	if err != nil {
		return sum, err
	}
	defer syscall.Close(fd)
	hash, buffer := sha256.New(), make([]byte, min(size+1, maxBuffer))
	for {
		n, err := syscall.Read(fd, buffer)
		switch {
		case errors.Is(err, syscall.EINTR):
		case err != nil:
			return sum, &os.PathError{Op: "read", Path: path, Err: err}
		case n == 0:
			return [sha256.Size]byte(hash.Sum(nil)), nil
		default:
			hash.Write(buffer[:n])
		}
	}
}

// openQuietly opens for reading without leaving an access time, and follows no link. An os.File costs as
// many system calls again.
func openQuietly(path string, flags int) (int, error) {
	flags |= syscall.O_RDONLY | syscall.O_CLOEXEC | syscall.O_NOFOLLOW
	fd, err := syscall.Open(path, flags|noAccessTime, 0)
	if errors.Is(err, syscall.EPERM) { // somebody else's file
		fd, err = syscall.Open(path, flags, 0)
	}
	if err != nil {
		return -1, &os.PathError{Op: "open", Path: path, Err: err}
	}
	return fd, nil
}

// openFile is for ordinary files and folders: a pipe would keep it waiting.
func openFile(path string) (*os.File, error) {
	fd, err := openQuietly(path, 0)
	if err != nil {
		return nil, err
	}
	return os.NewFile(uintptr(fd), path), nil
}

func readQuietly(path string) ([]byte, error) {
	file, err := openFile(path)
	if err != nil {
		return nil, err
	}
	defer file.Close()
	return io.ReadAll(file)
}

// errSkip makes walk leave a folder out.
var errSkip = errors.New("skip")

// walk visits a tree, folders before what is in them, in the order of names.
func walk(root string, visit func(name string, st *syscall.Stat_t) error) error {
	var descend func(name string) error
	descend = func(name string) error {
		var st syscall.Stat_t
		if err := syscall.Lstat(join(root, name), &st); err != nil {
			return &os.PathError{Op: "lstat", Path: join(root, name), Err: err}
		}
		if err := visit(name, &st); err != nil || st.Mode&syscall.S_IFMT != syscall.S_IFDIR {
			if errors.Is(err, errSkip) {
				return nil
			}
			return err
		}
		children, err := listFolder(join(root, name))
		if err != nil {
			return err
		}
		for _, child := range children {
			if err := descend(join(name, child)); err != nil {
				return err
			}
		}
		return nil
	}
	return descend(".")
}

func listFolder(path string) ([]string, error) {
	fd, err := openQuietly(path, syscall.O_DIRECTORY)
	if err != nil {
		return nil, err
	}
	folder := os.NewFile(uintptr(fd), path)
	defer folder.Close()
	names, err := folder.Readdirnames(-1)
	slices.Sort(names)
	return names, err
}

// join is filepath.Join for what is clean already: it is called for every file.
func join(folder, name string) string {
	switch {
	case name == ".":
		return folder
	case folder == ".":
		return name
	case folder == "/":
		return "/" + name
	}
	return folder + "/" + name
}

// check returns nil when the tree at root is what the fingerprint says, else the first difference. Times
// say nothing but what their setter means by them, so they are set back. What has a proof that still holds
// is not read again if trusted; what is read gets a new one.
func (f fingerprint) check(root string, known proofs, trusted bool) error {
	seen := 0
	err := walk(root, func(name string, st *syscall.Stat_t) error {
		want, found := f[name]
		if !found {
			return fmt.Errorf("%q was added", join(root, name))
		}
		seen++
		if known[name] == proofOf(st) && trusted {
			return nil
		}
		if err := want.check(join(root, name), st, trusted && known[name].holds(st)); err != nil {
			return err
		}
		known[name] = proofOf(st)
		if time.Since(time.Unix(st.Ctim.Unix())) < tick {
			delete(known, name)
		}
		return nil
	})
	if err != nil || seen == len(f) {
		return err
	}
	return f.missing(root)
}

// holds says that nothing but the access time can have changed.
func (p proof) holds(st *syscall.Stat_t) bool {
	return p.inode == st.Ino && p.changed == st.Ctim && p.modified == st.Mtim
}

// check sets the times back, then compares: so no change comes between the state in st and the reading.
func (e entry) check(path string, st *syscall.Stat_t, known bool) error {
	if st.Atim != e.accessed || st.Mtim != e.modified {
		if err := setTimes(path, e.accessed, e.modified); err != nil {
			return fmt.Errorf("%q: its times: %w", path, err)
		}
		if err := syscall.Lstat(path, st); err != nil {
			return err
		}
	}
	if known {
		return nil
	}
	is, err := readEntry(path, st)
	if err != nil {
		return err
	}
	if difference := e.compare(is); difference != "" {
		return fmt.Errorf("%q: its %s differs", path, difference)
	}
	return nil
}

func (f fingerprint) missing(root string) error {
	for _, name := range f.names() {
		if _, err := os.Lstat(join(root, name)); err != nil {
			return fmt.Errorf("%q was removed", join(root, name))
		}
	}
	return fmt.Errorf("%q: something in it changes all the time", root)
}

func (f fingerprint) names() []string {
	names := make([]string, 0, len(f))
	for name := range f {
		names = append(names, name)
	}
	slices.Sort(names) // a folder before what is in it
	return names
}

// compare names the first property that differs, but for times, or returns "".
func (e entry) compare(is entry) string {
	switch {
	case e.mode&syscall.S_IFMT != is.mode&syscall.S_IFMT:
		return "type"
	case e.mode != is.mode:
		return "mode"
	case e.uid != is.uid || e.gid != is.gid:
		return "owner"
	case e.links != is.links:
		return "number of names"
	case e.size != is.size || e.sum != is.sum || e.target != is.target || e.device != is.device:
		return "content"
	case e.xattrs != is.xattrs:
		return "set of attributes"
	case e.flags != is.flags:
		return "flags"
	}
	return ""
}

func readXattrs(path string) string {
	var all strings.Builder
	for _, name := range listXattrs(path) {
		all.WriteString(name + "=" + hex.EncodeToString([]byte(getXattr(path, name))) + " ")
	}
	return all.String()
}

// setTimes is os.Chtimes that follows no link.
func setTimes(path string, accessed, modified syscall.Timespec) error {
	name, err := syscall.BytePtrFromString(path)
	if err != nil {
		return err
	}
	times, here := [2]syscall.Timespec{accessed, modified}, atFdcwd
	_, _, errno := syscall.Syscall6(syscall.SYS_UTIMENSAT, uintptr(here), uintptr(unsafe.Pointer(name)),
		uintptr(unsafe.Pointer(&times)), symlinkNoFollow, 0, 0)
	if errno != 0 {
		return errno
	}
	return nil
}

// ancestors are the folders above a declared one: the way to it must lead where it led.
type ancestors map[string]stamp

func readAncestors(path string) (ancestors, error) {
	a := ancestors{}
	for folder := filepath.Dir(path); ; folder = filepath.Dir(folder) {
		var st syscall.Stat_t
		if err := syscall.Lstat(folder, &st); err != nil {
			return nil, fmt.Errorf("%s: %w", folder, err)
		}
		if st.Mode&syscall.S_IFMT != syscall.S_IFDIR {
			return nil, fmt.Errorf("%q is not a folder", folder)
		}
		a[folder] = stamp{attrs: attrs{mode: st.Mode, uid: st.Uid, gid: st.Gid}, inode: st.Ino}
		if folder == "/" {
			return a, nil
		}
	}
}

func (a ancestors) verify(path string) error {
	now, err := readAncestors(path)
	if err != nil {
		return err
	}
	for folder, was := range a {
		if now[folder] != was {
			return fmt.Errorf("%q was changed, which leads to %q", folder, path)
		}
	}
	return nil
}

func sleepTick() { time.Sleep(tick) }
