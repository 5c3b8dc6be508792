package pristine

import (
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"unsafe"
)

// These tests never call Restore: it removes SysV IPC, and here that would be the machine's own.

func write(t *testing.T, path string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte("x"), 0o644); err != nil {
		t.Fatal(err)
	}
}

func recorded(t *testing.T) (scratch, upper string, b *Baseline) {
	t.Helper()
	scratch, upper = t.TempDir(), t.TempDir()
	if err := os.Mkdir(filepath.Join(upper, "usr"), 0o755); err != nil {
		t.Fatal(err)
	}
	b, err := Record(Config{Scratch: []string{scratch}, Upper: upper})
	if err != nil {
		t.Fatal(err)
	}
	return scratch, upper, b
}

func TestUnchangedUpperIsClean(t *testing.T) {
	_, _, b := recorded(t)
	if err := b.verifyUpper(); err != nil {
		t.Error(err)
	}
}

func TestEveryChangeOfTheUpperIsNamed(t *testing.T) {
	for name, c := range map[string]struct {
		change func(upper string) error
		want   string
	}{
		"deepest file": {func(u string) error { write(t, u+"/usr/bin/x"); return nil }, "/usr/bin/x was written"},
		"mode":         {func(u string) error { return os.Chmod(u+"/usr", 0o700) }, "/usr was written"},
		"undone":       {func(u string) error { write(t, u+"/usr/x"); return os.Remove(u + "/usr/x") }, "/usr was written"},
		"attribute":    {func(u string) error { return syscall.Setxattr(u+"/usr", "user.x", []byte("1"), 0) }, "/usr was written"},
		"removed":      {func(u string) error { return os.Remove(u + "/usr") }, "was"},
	} {
		_, upper, b := recorded(t)
		if err := c.change(upper); err != nil {
			t.Fatal(name, err)
		}
		if err := b.verifyUpper(); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, want %q", name, err, c.want)
		}
	}
}

func TestScratchMustBeEmptyAtStart(t *testing.T) {
	folder := t.TempDir()
	write(t, folder+"/x")
	if _, err := Record(Config{Scratch: []string{folder}}); err == nil {
		t.Error("a full scratch folder was accepted")
	}
}

func TestScratchIsEmptiedWhateverIsInIt(t *testing.T) {
	folder := t.TempDir()
	write(t, folder+"/.hidden")
	write(t, folder+"/a/b/c")
	outside := t.TempDir()
	write(t, outside+"/kept")
	for _, err := range []error{
		os.Symlink(outside, folder+"/link"), syscall.Mkfifo(folder+"/pipe", 0o600),
		os.Chmod(folder+"/a/b", 0), os.Chmod(folder+"/a", 0),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	if err := emptyOut(folder); err != nil {
		t.Fatal(err)
	}
	if err := empty(folder); err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(outside + "/kept"); err != nil {
		t.Error("a link was followed:", err)
	}
}

func TestChangedScratchFolderIsRestoredOrFound(t *testing.T) {
	folder, _, b := recorded(t)
	if err := os.Chmod(folder, 0o700|os.ModeSticky); err != nil {
		t.Fatal(err)
	}
	_ = syscall.Setxattr(folder, "user.secret", []byte("1"), 0)
	if now, _ := readAttrs(folder); now == b.folders[folder] {
		t.Fatal("the change is not seen")
	}
	b.folders[folder].restore(folder)
	if now, err := readAttrs(folder); err != nil || now != b.folders[folder] {
		t.Errorf("%+v %v", now, err)
	}
}

func TestListsOfSysVAreRead(t *testing.T) {
	table := t.TempDir() + "/shm"
	text := "       key      shmid perms\n         0          7  1600\n 123456789     131079   600\n"
	if err := os.WriteFile(table, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	ids, err := listIPC(table)
	if err != nil || len(ids) != 2 || ids[0] != 7 || ids[1] != 131079 {
		t.Errorf("%v %v", ids, err)
	}
	if ids, err := listIPC(table + "-none"); ids != nil || err != nil {
		t.Errorf("a kernel without the table: %v %v", ids, err)
	}
}

func TestQueuesThatNobodySeesAreRefused(t *testing.T) {
	seen := []mount{{place: "/", kind: "overlay"}, {place: queues, kind: "mqueue"}}
	if err := seesQueues(seen); err != nil {
		t.Error(err)
	}
	name := []byte("agentfly-none\x00")
	_, _, errno := syscall.Syscall(syscall.SYS_MQ_UNLINK, uintptr(unsafe.Pointer(&name[0])), 0, 0)
	if errno != syscall.ENOENT {
		t.Skip("message queues cannot be made here: ", errno)
	}
	for _, hidden := range [][]mount{nil, {{place: queues, kind: "tmpfs"}}, {{place: "/mnt", kind: "mqueue"}}} {
		if err := seesQueues(hidden); err == nil || !strings.Contains(err.Error(), queues) {
			t.Errorf("%v: %v", hidden, err)
		}
	}
	if mounts, err := readMounts(); err != nil || seesQueues(mounts) == nil {
		t.Skip("they are seen here, so no baseline is refused:", err)
	}
	for method, refused := range map[string]bool{overlay: true, recreate: false} {
		err := (&Baseline{upper: t.TempDir()}).prepare(Reset{Method: method}, false, nil)
		if refused != (err != nil && strings.Contains(err.Error(), "message queues")) {
			t.Errorf("%s: %v", method, err)
		}
	}
}

func TestChangedValueOfAnAttributeIsSeenAndPutBack(t *testing.T) {
	folder := t.TempDir()
	if err := syscall.Setxattr(folder, "user.was", []byte("1"), 0); err != nil {
		t.Skip("no attributes here: ", err)
	}
	was, err := readAttrs(folder)
	if err != nil {
		t.Fatal(err)
	}
	if err := syscall.Setxattr(folder, "user.was", []byte("a message"), 0); err != nil {
		t.Fatal(err)
	}
	if now, _ := readAttrs(folder); now == was {
		t.Error("the change is not seen")
	}
	was.restore(folder)
	if now, err := readAttrs(folder); err != nil || now != was || getXattr(folder, "user.was") != "1" {
		t.Errorf("%+v %v", now, err)
	}
}

func TestWhatCannotBeProvenWhereNobodyAskedForItIsARecreate(t *testing.T) {
	unknown := Reset{Method: auto}
	for name, c := range map[string]struct {
		sealed bool
		b      *Baseline
		want   string
	}{
		"written root":      {false, &Baseline{}, "the root is not read-only"},
		"folder that stays": {true, &Baseline{scratch: []string{"/none"}, folders: map[string]attrs{}}, ""},
	} {
		if err := c.b.prepare(unknown, c.sealed, nil); err != nil {
			t.Fatal(name, err)
		}
		why, said := c.b.Refused()[emptying]
		if c.b.Method() != recreate || c.b.method != nil || c.b.guard != nil || !said || !strings.Contains(why, c.want) {
			t.Errorf("%s: %s, %q", name, c.b.Method(), why)
		}
	}
}

func TestEveryBitOfTheModeOfAScratchFolderIsPutBack(t *testing.T) {
	folder := t.TempDir()
	const mode = 0o3777 // of an emptyDir with a group, and of /tmp
	if err := syscall.Chmod(folder, mode); err != nil {
		t.Fatal(err)
	}
	was, err := readAttrs(folder)
	if err != nil {
		t.Fatal(err)
	}
	if err := syscall.Chmod(folder, 0o700); err != nil {
		t.Fatal(err)
	}
	was.restore(folder)
	if now, err := readAttrs(folder); err != nil || now != was {
		t.Errorf("%o after restore, %v; want %o", now.mode, err, was.mode)
	}
}
