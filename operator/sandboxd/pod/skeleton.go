package pod

import (
	"encoding/json"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
)

const (
	maxSmallFile = 1 << 20 // of one that is mounted itself; a larger one is mounted again
	openMode     = 0o777

	// What a copy takes: pages, and a kilobyte for what the kernel remembers of each. A folder that is within its
	// bound is copied, as long as all of them are: a copy is made once, an overlay for each sandbox.
	pageBytes, entryBytes = 4 << 10, 1 << 10
	folderBytes           = 2 << 20
	copiedBytes           = 6 << 20
)

// kernels are the folders that a sandbox gets in its own way.
var kernels = []string{"/dev", "/proc", "/sys"}

// hidden are mounts of the container that no sandbox is to see.
var hidden = []string{"/run/secrets/kubernetes.io", "/var/run/secrets/kubernetes.io"}

// builder copies what all sandboxes have of the container's root: everything but the large folders. An overlay cannot
// have a folder below it in which something is mounted, as in / and /etc: those are made anew, and each largest folder
// without a mount in it becomes an overlay, or is copied too.
type builder struct {
	stage  string
	mounts []string
	copied int64 // bytes that copied folders take
	plan   plan
}

// makeSkeleton makes the stage, which nobody can write to then. It returns the folders that overlays begin at, but for
// those of volumes: whoever else uses a volume may change it.
func makeSkeleton(o Order) (lower []string, err error) {
	if err := mount("", "/", "", syscall.MS_REC|syscall.MS_PRIVATE, ""); err != nil {
		return nil, err
	}
	b := &builder{stage: o.Stage}
	if b.mounts, err = mountPoints(); err != nil {
		return nil, err
	}
	options := "mode=0755"
	if o.UpperBytes > 0 {
		options += ",size=" + strconv.FormatInt(o.UpperBytes, 10)
	}
	if err := mount("agentfly", o.Stage, "tmpfs", 0, options); err != nil {
		return nil, err
	}
	for _, folder := range []string{skeletonFolder, rootFolder, upperFolder} {
		if err := os.Mkdir(o.Stage+folder, 0o755); err != nil {
			return nil, err
		}
	}
	if err := b.rebuild("/", o.Stage+skeletonFolder); err != nil {
		return nil, err
	}
	content, err := json.Marshal(b.plan)
	if err != nil {
		return nil, err
	}
	if err := os.WriteFile(o.Stage+planFile, content, 0o400); err != nil {
		return nil, err
	}
	lower = slices.DeleteFunc(slices.Clone(b.plan.Overlays), b.onVolume)
	// The file system, not only the mount: it is the same one by every way to it.
	return lower, mount("", o.Stage, "", syscall.MS_REMOUNT|syscall.MS_RDONLY, "")
}

// rebuild makes a folder entry by entry.
func (b *builder) rebuild(from, to string) error {
	var st syscall.Stat_t
	if err := syscall.Lstat(from, &st); err != nil {
		return &os.PathError{Op: "lstat", Path: from, Err: err}
	}
	entries, err := os.ReadDir(from)
	if err != nil {
		return err
	}
	for _, entry := range entries {
		source := filepath.Join(from, entry.Name())
		if source == b.stage {
			continue
		}
		if err := b.add(source, filepath.Join(to, entry.Name())); err != nil {
			return err
		}
	}
	return dress(from, to, &st)
}

func (b *builder) add(from, to string) error {
	var st syscall.Stat_t
	if err := syscall.Lstat(from, &st); err != nil {
		return &os.PathError{Op: "lstat", Path: from, Err: err}
	}
	switch st.Mode & syscall.S_IFMT {
	case syscall.S_IFDIR:
		if err := os.Mkdir(to, 0o755); err != nil {
			return err
		}
		return b.addFolder(from, to, &st)
	case syscall.S_IFREG:
		if st.Size > maxSmallFile && slices.Contains(b.mounts, from) {
			b.plan.Again = append(b.plan.Again, from)
			return os.WriteFile(to, nil, 0o600)
		}
		return copyFile(from, to, &st)
	case syscall.S_IFLNK:
		target, err := os.Readlink(from)
		if err != nil {
			return err
		}
		if err := os.Symlink(target, to); err != nil {
			return err
		}
		return dress(from, to, &st)
	case syscall.S_IFIFO:
		if err := syscall.Mkfifo(to, 0o600); err != nil {
			return &os.PathError{Op: "mkfifo", Path: to, Err: err}
		}
		return dress(from, to, &st)
	}
	return nil // a socket has nobody behind it, and devices are made apart
}

func (b *builder) addFolder(from, to string, st *syscall.Stat_t) error {
	switch {
	case slices.Contains(kernels, from):
		return dress(from, to, st)
	case slices.Contains(hidden, from):
		return os.Chmod(to, 0o755)
	case b.mountBelow(from):
		return b.rebuild(from, to)
	}
	if !b.onVolume(from) {
		if size, fits := treeBytes(from, min(folderBytes, copiedBytes-b.copied)); fits {
			b.copied += size
			return b.rebuild(from, to)
		}
	}
	b.plan.Overlays = append(b.plan.Overlays, from)
	return dress(from, to, st)
}

var errTooMuch = errors.New("more than is to be copied")

// treeBytes is what a copy of a folder takes. One with a file of another kind than are copied does not fit.
func treeBytes(folder string, limit int64) (size int64, fits bool) {
	err := filepath.WalkDir(folder, func(path string, entry fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		size += entryBytes
		switch entry.Type() {
		case 0:
			info, err := entry.Info()
			if err != nil {
				return err
			}
			size += (info.Size() + pageBytes - 1) / pageBytes * pageBytes
		case fs.ModeDir, fs.ModeSymlink:
		default:
			return errTooMuch
		}
		if size > limit {
			return errTooMuch
		}
		return nil
	})
	return size, err == nil
}

func (b *builder) mountBelow(folder string) bool {
	return slices.ContainsFunc(b.mounts, func(place string) bool { return strings.HasPrefix(place, folder+"/") })
}

// onVolume says that a path is on another file system than the container's root.
func (b *builder) onVolume(path string) bool {
	return slices.ContainsFunc(b.mounts, func(place string) bool {
		return place != "/" && (path == place || strings.HasPrefix(path, place+"/"))
	})
}
