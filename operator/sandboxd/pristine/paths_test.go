package pristine

import (
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
)

// sample makes a folder with one of everything, and returns its path.
func sample(t *testing.T) string {
	t.Helper()
	return sampleIn(t, t.TempDir())
}

func sampleIn(t *testing.T, folder string) string {
	t.Helper()
	work := filepath.Join(folder, "work")
	write(t, work+"/src/main.py")
	write(t, work+"/src/new\nline")
	write(t, work+"/src/not\xffutf8")
	write(t, work+"/data/deep/er/x")
	old := time.Unix(1_500_000_000, 123)
	for _, err := range []error{
		os.Symlink("main.py", work+"/src/link"), os.Link(work+"/src/main.py", work+"/data/hard"),
		syscall.Mkfifo(work+"/pipe", 0o620), os.Mkdir(work+"/empty", 0o1777), os.Chmod(work+"/empty", 0o777|os.ModeSticky),
		syscall.Setxattr(work+"/data", "user.kept", []byte("1\x00 2"), 0), os.Chtimes(work+"/src/main.py", old, old),
		os.Chtimes(work+"/data", old, old), os.Chmod(work+"/src/main.py", 0o755|os.ModeSetuid),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	t.Cleanup(func() { // a store cannot be listed, nor what a tenant closed
		_ = exec.Command("chmod", "-R", "u+rwX", filepath.Dir(work)).Run()
	})
	return work
}

// account tells a tree in another way than the code under test does.
func account(t *testing.T, root string) string {
	t.Helper()
	var all strings.Builder
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		info, err := d.Info()
		if err != nil {
			return err
		}
		st := info.Sys().(*syscall.Stat_t)
		name, _ := filepath.Rel(root, path)
		fmt.Fprintf(&all, "%q %v %d:%d %v", name, info.Mode(), st.Uid, st.Gid, info.ModTime().UnixNano())
		switch {
		case info.Mode().IsRegular():
			content, err := os.ReadFile(path)
			if err != nil {
				return err
			}
			fmt.Fprintf(&all, " %d %q", st.Nlink, content)
		case info.Mode()&fs.ModeSymlink != 0:
			target, _ := os.Readlink(path)
			fmt.Fprintf(&all, " %q", target)
		}
		value := make([]byte, 100)
		if n, err := syscall.Getxattr(path, "user.kept", value); err == nil && info.Mode()&fs.ModeSymlink == 0 {
			fmt.Fprintf(&all, " %q", value[:n])
		}
		if _, err := syscall.Getxattr(path, "user.left", value); err == nil {
			fmt.Fprint(&all, " left")
		}
		fmt.Fprintln(&all)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return all.String()
}

// changes are the lines of two accounts that are in one of them only.
func changes(before, after string) string {
	var all strings.Builder
	for mark, pair := range map[string][2]string{"-": {before, after}, "+": {after, before}} {
		for line := range strings.Lines(pair[0]) {
			if !strings.Contains("\n"+pair[1], "\n"+line) {
				fmt.Fprintf(&all, "%s%.200s\n", mark, line)
			}
		}
	}
	return all.String()
}

func swapped(t *testing.T, work string) *swaps {
	t.Helper()
	s, err := newSwaps([]string{work}, nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { // the spare is made in a folder that the test removes
		if !s.spent {
			<-s.ready
		}
	})
	return s
}

func next(m method) error {
	if err := m.restore(10 * time.Second); err != nil {
		return err
	}
	return m.verify(false)
}

// vandalism is what a tenant may do to a declared folder and must not outlive the lease.
var vandalism = map[string]func(work string) error{
	"nothing":        func(string) error { return nil },
	"write":          func(w string) error { return os.WriteFile(w+"/src/main.py", []byte("evil"), 0o644) },
	"new file":       func(w string) error { return os.WriteFile(w+"/src/new", []byte("evil"), 0o644) },
	"odd names":      func(w string) error { return os.WriteFile(w+"/\xff\n\x01", []byte("evil"), 0o644) },
	"remove":         func(w string) error { return os.RemoveAll(w + "/data") },
	"remove all":     os.RemoveAll,
	"rename":         func(w string) error { return os.Rename(w+"/src", w+"/other") },
	"mode":           func(w string) error { return os.Chmod(w+"/src/main.py", 0o600) },
	"mode of folder": func(w string) error { return os.Chmod(w, 0) },
	"closed": func(w string) error {
		if err := os.Chmod(w+"/data/deep/er", 0); err != nil {
			return err
		}
		return os.Chmod(w+"/data/deep", 0)
	},
	"attribute":  func(w string) error { return syscall.Setxattr(w+"/src/main.py", "user.left", []byte("1"), 0) },
	"times":      func(w string) error { return os.Chtimes(w+"/src/main.py", time.Unix(1, 0), time.Unix(2, 0)) },
	"time of it": func(w string) error { return os.Chtimes(w, time.Unix(1, 0), time.Unix(2, 0)) },
	"link to a folder": func(w string) error {
		if err := os.Rename(w, w+".away"); err != nil {
			return err
		}
		defer os.RemoveAll(w + ".away")
		return os.Symlink("/etc", w)
	},
	"a file instead": func(w string) error {
		if err := os.RemoveAll(w); err != nil {
			return err
		}
		return os.WriteFile(w, []byte("evil"), 0o644)
	},
	"link instead of file": func(w string) error {
		if err := os.Remove(w + "/src/main.py"); err != nil {
			return err
		}
		return os.Symlink("/etc/passwd", w+"/src/main.py")
	},
	"hard link inside": func(w string) error { return os.Link(w+"/data/deep/er/x", w+"/src/again") },
	"other pipe":       func(w string) error { return os.Remove(w + "/src/link") },
	"deep": func(w string) error {
		return exec.Command("sh", "-c", `cd "$1" && for i in $(seq 40); do d=$(printf %0120d 0); mkdir $d && cd -P $d || exit; done; echo x > x`, "sh", w).Run()
	},
	"same size, forged times": func(w string) error {
		path := w + "/src/main.py"
		info, err := os.Stat(path)
		if err != nil {
			return err
		}
		if err := os.WriteFile(path, []byte("y"), 0o644); err != nil {
			return err
		}
		if err := os.Chmod(path, info.Mode()); err != nil {
			return err
		}
		return os.Chtimes(path, info.ModTime(), info.ModTime())
	},
}

func TestSwapBringsEverythingBack(t *testing.T) {
	work := sample(t)
	s := swapped(t, work)
	before := account(t, work)
	for name, vandalize := range vandalism {
		if err := vandalize(work); err != nil {
			t.Fatal(name, err)
		}
		if err := next(s); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		if changed := changes(before, account(t, work)); changed != "" {
			t.Fatalf("%s:\n%s", name, changed)
		}
	}
}

func TestCopyHandedOutFirstIsLikeTheOriginal(t *testing.T) {
	work := sample(t)
	before := account(t, work)
	swapped(t, work)
	if changed := changes(before, account(t, work)); changed != "" {
		t.Error(changed)
	}
}

func TestOpenFilesWorkingFoldersAndLinksOutLeadNowhere(t *testing.T) {
	work := sample(t)
	s := swapped(t, work)
	held, err := os.OpenFile(work+"/src/main.py", os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer held.Close()
	folder, err := os.Open(work + "/src") // a working folder is no more than this
	if err != nil {
		t.Fatal(err)
	}
	defer folder.Close()
	out := filepath.Join(t.TempDir(), "out")
	if err := os.Link(work+"/src/main.py", out); err != nil {
		t.Fatal(err)
	}
	before := account(t, work)
	if err := next(s); err != nil {
		t.Fatal(err)
	}
	_, _ = held.WriteString("evil")
	if err := os.WriteFile(out, []byte("evil"), 0o644); err != nil {
		t.Fatal(err)
	}
	_ = os.WriteFile(fmt.Sprintf("/proc/self/fd/%d/evil", folder.Fd()), nil, 0o644)
	// The link out took a name more than the fresh copy has.
	if changed := changes(strings.ReplaceAll(before, " 3 \"x\"", " 2 \"x\""), account(t, work)); changed != "" {
		t.Error(changed)
	}
	if err := s.verify(false); err != nil {
		t.Error(err)
	}
}

func TestLinkIntoTheFreshCopyIsFound(t *testing.T) {
	work := sample(t)
	s := swapped(t, work)
	if err := <-s.ready; err != nil { // it is made while the lease runs
		t.Fatal(err)
	}
	s.ready <- nil
	out := filepath.Join(t.TempDir(), "out")
	if err := os.Link(s.folders[0].spare+"/src/main.py", out); err != nil {
		t.Fatal(err)
	}
	if err := next(s); err == nil || !strings.Contains(err.Error(), "names differs") {
		t.Error(err)
	}
}

func TestSpareThatWasTouchedIsFound(t *testing.T) {
	for name, touch := range map[string]func(spare string) error{
		"write": vandalism["same size, forged times"], "new file": vandalism["new file"], "remove": vandalism["remove"],
		"mode": vandalism["mode"], "attribute": vandalism["attribute"],
	} {
		s := swapped(t, sample(t))
		if err := <-s.ready; err != nil {
			t.Fatal(err)
		}
		s.ready <- nil
		if err := touch(s.folders[0].spare); err != nil {
			t.Fatal(name, err)
		}
		s.folders[0].exposed = false // as for a tenant without privileges: the change time must do
		if err := next(s); err == nil {
			t.Errorf("%s: not found", name)
		}
	}
}

func TestStoreThatWasTouchedIsFound(t *testing.T) {
	for name, touch := range map[string]func(f *swap) error{
		"opened":  func(f *swap) error { return os.Chmod(f.store, 0o700) },
		"undone":  func(f *swap) error { _ = os.Chmod(f.store, 0o700); return os.Chmod(f.store, storeMode) },
		"added":   func(f *swap) error { return os.Mkdir(f.store+"/x", 0o700) },
		"renamed": func(f *swap) error { return os.Rename(f.store, f.store+"x") },
	} {
		s := swapped(t, sample(t))
		if err := <-s.ready; err != nil {
			t.Fatal(err)
		}
		s.ready <- nil
		if err := touch(s.folders[0]); err != nil {
			t.Fatal(name, err)
		}
		if err := next(s); err == nil || !strings.Contains(err.Error(), "was changed") {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestWayToTheFolderMustStay(t *testing.T) {
	work := filepath.Join(sample(t), "data", "deep")
	s := swapped(t, work)
	above := filepath.Dir(work)
	if err := os.Rename(above, above+".away"); err != nil {
		t.Fatal(err)
	}
	defer os.Rename(above+".away", above)
	if err := os.Symlink(above+".away", above); err != nil {
		t.Fatal(err)
	}
	defer os.Remove(above)
	if err := next(s); err == nil {
		t.Error("a link above the folder was not found")
	}
}

func TestSpareThatIsLateOrFailedIsNoReset(t *testing.T) {
	s := swapped(t, sample(t))
	if err := <-s.ready; err != nil {
		t.Fatal(err)
	}
	if err := s.restore(time.Millisecond); err == nil || !strings.Contains(err.Error(), "timeoutSeconds") {
		t.Error(err)
	}
	if err := s.restore(time.Minute); err == nil {
		t.Error("a second one waits for nothing")
	}
}

func TestDaemonKilledInASwapLeavesAWholeFolderAndIsNotTrustedAgain(t *testing.T) {
	work := sample(t)
	s := swapped(t, work)
	before := account(t, work)
	if err := <-s.ready; err != nil {
		t.Fatal(err)
	}
	s.spent = true
	f := s.folders[0]
	if err := takePlace(f.spare, f.path); err != nil { // the one step of a swap, and then no other
		t.Fatal(err)
	}
	if changed := changes(before, account(t, work)); changed != "" {
		t.Error(changed)
	}
	if _, err := newSwaps([]string{work}, nil); err == nil || !strings.Contains(err.Error(), "may have been used") {
		t.Error(err)
	}
}

func TestTenThousandFilesAreSwapped(t *testing.T) {
	folder, err := os.MkdirTemp(memory, "sandboxd-test-") // a disk takes half a minute
	if err != nil {
		t.Skip("needs a file system in memory: ", err)
	}
	t.Cleanup(func() { os.RemoveAll(folder) })
	work := sampleIn(t, folder)
	for i := range 10_000 {
		if i%100 == 0 {
			if err := os.Mkdir(fmt.Sprintf("%s/many%d", work, i/100), 0o755); err != nil {
				t.Fatal(err)
			}
		}
		if err := os.WriteFile(fmt.Sprintf("%s/many%d/%d", work, i/100, i), []byte("x"), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	s := swapped(t, work)
	if err := os.RemoveAll(work + "/many7"); err != nil {
		t.Fatal(err)
	}
	if err := next(s); err != nil {
		t.Fatal(err)
	}
	if entries, err := os.ReadDir(work + "/many7"); err != nil || len(entries) != 100 {
		t.Error(len(entries), err)
	}
}

func TestMarkedFolderIsSwappedWhereMarksCanBeTakenAway(t *testing.T) {
	work := sample(t)
	s := swapped(t, work)
	immutable := uint32(0x10)
	ioctlFlags(work+"/src", setFlags, &immutable)
	if readFlags(work+"/src")&immutable == 0 {
		t.Skip("this needs CAP_LINUX_IMMUTABLE and a file system with such marks")
	}
	ioctlFlags(work, setFlags, &immutable)
	before := s.folders[0].path
	if err := next(s); err != nil {
		t.Fatal(err)
	}
	if readFlags(before)&immutable != 0 || readFlags(before+"/src")&immutable != 0 {
		t.Error("the mark is still there")
	}
}

func TestDeclaredFolderIsCheckedAtStart(t *testing.T) {
	work := sample(t)
	link := work + ".link"
	if err := os.Symlink(work, link); err != nil {
		t.Fatal(err)
	}
	for path, words := range map[string]string{
		"relative": "absolute", "/": "absolute", work + "/../x": "absolute", work + "/none": "no such file",
		work + "/src/main.py": "not a folder", link: "not a folder", "/proc": "mount",
	} {
		if _, err := newSwaps([]string{path}, nil); err == nil || !strings.Contains(err.Error(), words) || !strings.Contains(err.Error(), "reset.paths") {
			t.Errorf("%s: %v", path, err)
		}
	}
	if _, err := newSwaps([]string{work, work + "/src"}, nil); err == nil || !strings.Contains(err.Error(), "overlap") {
		t.Error(err)
	}
	if _, err := newSwaps(nil, nil); err == nil || !strings.Contains(err.Error(), "is empty") {
		t.Error(err)
	}
}
