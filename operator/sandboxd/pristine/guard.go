package pristine

import (
	"fmt"
	"os"
	"slices"
	"strings"
	"syscall"
)

const (
	maxGuarded   = 300_000  // entries, about 100 bytes each in the daemon's memory
	maxLooseFile = 64 << 10 // /etc/hosts and its like
	writeAccess  = 2        // W_OK
	readAccess   = 4        // R_OK
	searchAccess = 1        // X_OK
)

// kernelKinds are file systems whose files are the kernel's, not a tenant's.
var kernelKinds = []string{"proc", "sysfs", "cgroup", "cgroup2", "devpts", "mqueue", "securityfs", "debugfs", "tracefs", "bpf", "binfmt_misc"}

// guard watches all that a tenant may write to although nobody declared it: it must not change.
type guard struct {
	stamps map[string]stamp
	// shared are folders that the daemon changes too: of these everything must stay but the times.
	shared map[string]sharedFolder
	loose  map[string]looseFile
}

// looseFile is one that is mounted by itself into every container, such as /etc/hosts: small, and put back.
type looseFile struct {
	entry
	content []byte
}

type sharedFolder struct {
	entry
	names string
}

// newGuard walks every file system that can be written, but for the folders that somebody answers for.
func newGuard(answered, changed []string) (*guard, error) {
	mounts, err := readMounts()
	if err != nil {
		return nil, err
	}
	g := &guard{stamps: map[string]stamp{}, shared: map[string]sharedFolder{}, loose: map[string]looseFile{}}
	places := slices.Clone(answered)
	for _, m := range mounts {
		places = append(places, m.place)
	}
	for _, folder := range changed {
		if slices.ContainsFunc(answered, func(p string) bool { return inside(folder, p) }) {
			continue
		}
		if g.shared[folder], err = readShared(folder); err != nil {
			return nil, err
		}
	}
	for _, m := range mounts {
		covered := slices.ContainsFunc(answered, func(p string) bool { return inside(m.place, p) })
		if !m.writable || covered || slices.Contains(kernelKinds, m.kind) {
			continue
		}
		if err := g.add(m.place, places); err != nil {
			return nil, fmt.Errorf("the rest of what can be written: %w", err)
		}
	}
	return g, nil
}

func (g *guard) add(root string, places []string) error {
	info, err := os.Lstat(root)
	if err != nil {
		return nil // another mount hides it
	}
	if info.Mode().IsRegular() {
		return g.addLoose(root, info.Size())
	}
	asked, trusted := false, false
	return walk(root, func(name string, st *syscall.Stat_t) error {
		path := join(root, name)
		if path != root && slices.Contains(places, path) {
			return errSkip
		}
		if closed(path, st) {
			return errSkip
		}
		if _, shared := g.shared[path]; shared || !mayWrite(path, st) {
			return nil
		}
		if st.Mode&syscall.S_IFMT == syscall.S_IFDIR && !asked {
			trusted, err = recordsStores(path)
			asked = err == nil // else it is not writable right now
			if err := syscall.Lstat(path, st); err != nil {
				return err
			}
		}
		if st.Mode&syscall.S_IFMT == syscall.S_IFREG && st.Size > 0 && !trusted {
			return fmt.Errorf("%q is on a file system that does not record every write: mount it read-only, or declare it", path)
		}
		if len(g.stamps) == maxGuarded {
			return fmt.Errorf("more than %d files and folders: mount the root read-only", maxGuarded)
		}
		g.stamps[path] = stamp{attrs{mode: st.Mode, uid: st.Uid, gid: st.Gid}, st.Ino, st.Ctim}
		return nil
	})
}

// closed says that a folder is another user's and shut to us: commands are the same user, without the rights of
// root, and get no further than we do.
func closed(path string, st *syscall.Stat_t) bool {
	euid := os.Geteuid()
	return st.Mode&syscall.S_IFMT == syscall.S_IFDIR && euid != 0 && int(st.Uid) != euid &&
		syscall.Access(path, readAccess|searchAccess) != nil
}

func mayWrite(path string, st *syscall.Stat_t) bool {
	if int(st.Uid) == os.Geteuid() {
		return true
	}
	return st.Mode&syscall.S_IFMT != syscall.S_IFLNK && syscall.Access(path, writeAccess) == nil
}

func (g *guard) addLoose(path string, size int64) error {
	if size > maxLooseFile || syscall.Access(path, writeAccess) != nil {
		return nil
	}
	var st syscall.Stat_t
	if err := syscall.Lstat(path, &st); err != nil {
		return err
	}
	e, err := readEntry(path, &st)
	if err != nil {
		return err
	}
	content, err := readQuietly(path)
	g.loose[path] = looseFile{e, content}
	return err
}

func readShared(folder string) (s sharedFolder, err error) {
	var st syscall.Stat_t
	if err := syscall.Lstat(folder, &st); err != nil {
		return s, err
	}
	if s.entry, err = readEntry(folder, &st); err != nil {
		return s, err
	}
	names, err := listFolder(folder)
	s.names = strings.Join(names, "/")
	return s, err
}

// restore puts the loose files back.
func (g *guard) restore() error {
	for path, was := range g.loose {
		if was.verify(path) != nil {
			if err := os.WriteFile(path, was.content, 0); err != nil {
				return err
			}
			if err := was.dress(path); err != nil {
				return err
			}
		}
		_ = setTimes(path, was.accessed, was.modified) // who may not set them back could not set them either
	}
	return nil
}

func (l looseFile) verify(path string) error {
	var st syscall.Stat_t
	if err := syscall.Lstat(path, &st); err != nil {
		return err
	}
	is, err := readEntry(path, &st)
	if err != nil {
		return err
	}
	if difference := l.compare(is); difference != "" {
		return fmt.Errorf("%q: its %s differs", path, difference)
	}
	if st.Mtim != l.modified {
		return fmt.Errorf("%q: its time was changed", path)
	}
	return nil
}

func (g *guard) verify() error {
	for path, was := range g.loose {
		if err := was.verify(path); err != nil {
			return err
		}
	}
	for folder, was := range g.shared {
		now, err := readShared(folder)
		if err != nil {
			return err
		}
		if difference := was.compare(now.entry); difference != "" {
			return fmt.Errorf("%q: its %s differs", folder, difference)
		}
		if now.names != was.names {
			return fmt.Errorf("%q: something was added or removed, and it is not declared", folder)
		}
	}
	// A change below a folder may show on the folder too: name the longest path, which a person knows.
	changed := ""
	for path, was := range g.stamps {
		if now, err := stampOf(path); (err != nil || now != was) && len(path) > len(changed) {
			changed = path
		}
	}
	if changed != "" {
		return fmt.Errorf("%q was changed, and it is not declared", changed)
	}
	return nil
}
