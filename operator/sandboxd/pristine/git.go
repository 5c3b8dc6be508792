package pristine

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"
)

const (
	gitFolder = ".git"
	// maxKept bounds what the daemon keeps of a repository in memory: its index, references, configuration
	// and hooks. The rest, its objects, is never changed by git, only added to.
	maxKept    = 32 << 20
	gitTimeout = 5 * time.Minute // of the first look at a repository, whose index may be cold
)

// gitEnv keeps everybody's configuration away but the machine's and the repository's own.
var gitEnv = []string{
	"HOME=/nonexistent", "GIT_CONFIG_GLOBAL=/dev/null", "GIT_TERMINAL_PROMPT=0", "GIT_OPTIONAL_LOCKS=0",
	"GIT_CONFIG_COUNT=1", "GIT_CONFIG_KEY_0=safe.directory", "GIT_CONFIG_VALUE_0=*",
}

// repository is the method git. The daemon itself takes away what was added and puts back modes, links and
// all of .git but the objects, which it kept; only then does git run, so that no hook or filter of a tenant
// ever does, and writes the files of the index that are changed or gone.
type repository struct {
	*tree
	run  Run
	kept map[string][]byte // content of the files in .git that are no objects
}

func newRepository(path string, scratch []string, run Run) (*repository, error) {
	if info, err := os.Lstat(filepath.Join(path, gitFolder)); err != nil || !info.IsDir() {
		return nil, fmt.Errorf("reset.git: %q has no folder .git: declare the top folder of a repository, not of a linked worktree or submodule", path)
	}
	for _, step := range [][]string{
		{"update-index", "-q", "--refresh"}, // says by its exit code, too, that files differ
		{"diff-files", "--quiet"},
		{"diff-index", "--cached", "--quiet", "HEAD", "--"},
	} {
		if err := run(append([]string{"git", "-C", path}, step...), gitEnv, path, "", gitTimeout); err != nil {
			return nil, fmt.Errorf("reset.git: %q: git %s: %w: git must be in the image, and the files must be those of the last commit", path, step[0], err)
		}
	}
	t, err := newTree("reset.git", path, scratch)
	if err != nil {
		return nil, err
	}
	r := &repository{tree: t, run: run, kept: map[string][]byte{}}
	total := 0
	for _, name := range t.want.names() {
		if !keeps(name, t.want[name]) {
			continue
		}
		content, err := readQuietly(join(path, name))
		if err != nil {
			return nil, fmt.Errorf("reset.git: %w", err)
		}
		if total += len(content); total > maxKept {
			return nil, fmt.Errorf("reset.git: .git of %q has more than %d MiB beside its objects: use paths", path, maxKept>>20)
		}
		r.kept[name] = content
	}
	return r, nil
}

// keeps says that a file is git's own, but no object.
func keeps(name string, e entry) bool {
	return e.mode&syscall.S_IFMT == syscall.S_IFREG && inside(name, gitFolder) && !strings.Contains(name+"/", "/objects/")
}

func (r *repository) owned() (folders, changed []string) { return []string{r.path}, nil }

func (r *repository) restore(timeout time.Duration) error {
	if err := r.way.verify(r.path); err != nil {
		return err
	}
	lost, err := r.mend()
	if err != nil || len(lost) == 0 {
		return err
	}
	argv := []string{"git", "-C", r.path, "checkout-index", "--force", "--quiet", "-z", "--stdin"}
	if err := r.run(argv, gitEnv, r.path, strings.Join(lost, "\x00")+"\x00", timeout); err != nil {
		return fmt.Errorf("git: %w", err)
	}
	still, err := r.mend()
	if err == nil && len(still) > 0 {
		err = fmt.Errorf("git: %q did not come back", join(r.path, still[0]))
	}
	return err
}

// mend removes what was added, puts back what it can, and names the files that only git can write; those
// are gone afterwards.
func (r *repository) mend() (lost []string, err error) {
	if err := r.clear(); err != nil {
		return nil, err
	}
	for _, name := range r.want.names() {
		want, path := r.want[name], join(r.path, name)
		var st syscall.Stat_t
		err := syscall.Lstat(path, &st)
		if err == nil && r.trusted && r.known[name].holds(&st) {
			continue
		}
		if err == nil {
			err = r.redress(path, want, &st)
		}
		if errors.Is(err, os.ErrNotExist) {
			err = r.recreate(name, want)
		}
		if errors.Is(err, os.ErrNotExist) {
			lost = append(lost, name)
			continue
		}
		if err != nil {
			return nil, err
		}
	}
	return lost, nil
}

// clear removes what is not in the fingerprint, or is something else there. A closed folder is opened first.
func (r *repository) clear() error {
	var descend func(name string) error
	descend = func(name string) error {
		path := join(r.path, name)
		want, found := r.want[name]
		var st syscall.Stat_t
		if err := syscall.Lstat(path, &st); err != nil {
			return err
		}
		if !found || want.mode&syscall.S_IFMT != st.Mode&syscall.S_IFMT {
			return removeTree(path)
		}
		if st.Mode&syscall.S_IFMT != syscall.S_IFDIR {
			return nil
		}
		if st.Mode != want.mode {
			_ = os.Chmod(path, 0o700)
		}
		children, err := listFolder(path)
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

// redress puts everything but the content back; where the content differs the file is removed.
func (r *repository) redress(path string, want entry, st *syscall.Stat_t) error {
	if st.Mode != want.mode && want.mode&syscall.S_IFMT != syscall.S_IFLNK {
		if err := syscall.Chmod(path, want.mode&0o7777|0o400); err != nil { // readable, to be compared
			return err
		}
	}
	is, err := readEntry(path, st)
	if err != nil {
		return err
	}
	if is.flags != want.flags {
		flags := want.flags
		ioctlFlags(path, setFlags, &flags)
	}
	is.mode, is.uid, is.gid, is.xattrs, is.flags = want.mode, want.uid, want.gid, want.xattrs, want.flags
	if want.compare(is) == "" {
		return want.dress(path)
	}
	if err := os.Remove(path); err != nil {
		return err
	}
	return os.ErrNotExist
}

// recreate makes anew whatever git does not keep; of the rest the error is os.ErrNotExist.
func (r *repository) recreate(name string, want entry) error {
	path := join(r.path, name)
	var err error
	switch want.mode & syscall.S_IFMT {
	case syscall.S_IFDIR:
		err = os.Mkdir(path, 0o700)
	case syscall.S_IFLNK:
		err = os.Symlink(want.target, path)
	case syscall.S_IFREG:
		content, kept := r.kept[name]
		if !kept {
			return os.ErrNotExist
		}
		err = os.WriteFile(path, content, 0o600)
	default:
		err = fmt.Errorf("%q: a pipe, socket or device was removed", path)
	}
	if err != nil {
		return err
	}
	return want.dress(path)
}
