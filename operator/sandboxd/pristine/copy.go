package pristine

import (
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"syscall"
	"unsafe"
)

// copyTree makes a faithful copy of a tree in an empty folder: types, modes, owners, attributes, times and
// the hard links inside of it. It reports the first thing that it may not copy.
func copyTree(from, to string) error {
	places := map[uint64]string{} // inode -> its first place in the copy
	folders := map[string]entry{} // finished last: what is put into one changes its times
	err := walk(from, func(name string, st *syscall.Stat_t) error {
		source, target := join(from, name), join(to, name)
		if first, linked := places[st.Ino]; linked {
			return os.Link(first, target)
		}
		if st.Mode&syscall.S_IFMT != syscall.S_IFDIR && st.Nlink > 1 {
			places[st.Ino] = target
		}
		e := entry{mode: st.Mode, uid: st.Uid, gid: st.Gid, xattrs: readXattrs(source), accessed: st.Atim, modified: st.Mtim}
		if err := copyContent(source, target, name == ".", st); err != nil {
			return err
		}
		if st.Mode&syscall.S_IFMT == syscall.S_IFDIR {
			folders[name] = e
			return nil
		}
		return e.dress(target)
	})
	for _, name := range reversed(fingerprint(folders).names()) {
		if err != nil {
			return err
		}
		err = folders[name].dress(join(to, name))
	}
	return err
}

func copyContent(source, target string, root bool, st *syscall.Stat_t) error {
	switch st.Mode & syscall.S_IFMT {
	case syscall.S_IFDIR:
		if root {
			return nil
		}
		return os.Mkdir(target, 0o700)
	case syscall.S_IFLNK:
		to, err := os.Readlink(source)
		if err != nil {
			return err
		}
		return os.Symlink(to, target)
	case syscall.S_IFREG:
		return copyFile(source, target)
	}
	if err := syscall.Mknod(target, st.Mode, int(st.Rdev)); err != nil {
		return &os.PathError{Op: "mknod", Path: target, Err: err}
	}
	return nil
}

func copyFile(source, target string) error {
	in, err := openFile(source)
	if err != nil {
		return err
	}
	defer in.Close()
	out, err := os.OpenFile(target, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	_, err = io.Copy(out, in)
	return errors.Join(err, out.Close())
}

// dress gives a file or folder everything but its content: the owner first, which takes bits of the mode.
func (e entry) dress(path string) error {
	if err := os.Lchown(path, int(e.uid), int(e.gid)); err != nil {
		return err
	}
	if e.mode&syscall.S_IFMT != syscall.S_IFLNK {
		if err := syscall.Chmod(path, e.mode&0o7777); err != nil {
			return &os.PathError{Op: "chmod", Path: path, Err: err}
		}
	}
	if err := e.setXattrs(path); err != nil {
		return err
	}
	if err := setTimes(path, e.accessed, e.modified); err != nil {
		return &os.PathError{Op: "utimensat", Path: path, Err: err}
	}
	return nil
}

// setXattrs makes the attributes these and no others.
func (e entry) setXattrs(path string) error {
	if readXattrs(path) == e.xattrs {
		return nil
	}
	wanted := map[string]string{}
	for _, pair := range strings.Fields(e.xattrs) {
		name, value, _ := strings.Cut(pair, "=")
		wanted[name] = value
	}
	for _, name := range listXattrs(path) {
		if _, found := wanted[name]; !found {
			_, _ = xattrCall(syscall.SYS_LREMOVEXATTR, path, name, nil, 0) // what stays is found
		}
	}
	for name, text := range wanted {
		value, err := hex.DecodeString(text)
		if err != nil {
			return err
		}
		if getXattr(path, name) == string(value) {
			continue
		}
		if _, errno := xattrCall(syscall.SYS_LSETXATTR, path, name, value, 0); errno != 0 {
			return fmt.Errorf("%s: attribute %s: %w", path, name, errno)
		}
	}
	return nil
}

// removeTree removes whatever is at a path, also what its owner closed or marked as not to be changed.
func removeTree(path string) error {
	err := os.RemoveAll(path)
	if err == nil {
		return nil
	}
	unlock(path)
	return os.RemoveAll(path)
}

func reversed(names []string) []string {
	for i, j := 0, len(names)-1; i < j; i, j = i+1, j-1 {
		names[i], names[j] = names[j], names[i]
	}
	return names
}

// recordsStores asks the file system of a folder whether a store through a mapping changes a file's change
// time. Where it does not (in memory), an unchanged time proves nothing about the content.
func recordsStores(folder string) (bool, error) {
	file, err := os.CreateTemp(folder, "probe-")
	if err != nil {
		return false, err
	}
	path := file.Name()
	defer os.Remove(path)
	defer file.Close()
	if _, err := file.Write(make([]byte, 1)); err != nil {
		return false, err
	}
	sleepTick()
	var before, after syscall.Stat_t
	if err := syscall.Lstat(path, &before); err != nil {
		return false, err
	}
	memory, err := syscall.Mmap(int(file.Fd()), 0, 1, syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_SHARED)
	if err != nil {
		return false, nil // nothing is known, so nothing is trusted
	}
	*(*byte)(unsafe.Pointer(unsafe.SliceData(memory))) = 1
	if err := syscall.Munmap(memory); err != nil {
		return false, err
	}
	err = syscall.Lstat(path, &after)
	return before.Ctim != after.Ctim, err
}
