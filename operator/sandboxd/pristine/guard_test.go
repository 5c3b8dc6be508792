package pristine

import (
	"os"
	"syscall"
	"testing"
	"time"
)

func TestLooseFileIsPutBackWithBothOfItsTimes(t *testing.T) {
	path := t.TempDir() + "/hosts"
	write(t, path)
	g := &guard{loose: map[string]looseFile{}}
	if err := g.addLoose(path, 1); err != nil {
		t.Fatal(err)
	}
	for what, change := range map[string]func(was looseFile) error{
		"content": func(looseFile) error { return os.WriteFile(path, []byte("y"), 0) },
		"time of its last access": func(was looseFile) error {
			return os.Chtimes(path, time.Unix(12345, 678), time.Unix(was.modified.Unix()))
		},
	} {
		was := g.loose[path]
		if err := change(was); err != nil {
			t.Fatal(err)
		}
		if err := g.restore(); err != nil {
			t.Fatal(err)
		}
		var now syscall.Stat_t
		if err := syscall.Lstat(path, &now); err != nil {
			t.Fatal(err)
		}
		if err := was.verify(path); err != nil || now.Atim != was.accessed || now.Mtim != was.modified {
			t.Errorf("%s: %v, %v %v", what, err, now.Atim, now.Mtim)
		}
	}
}
