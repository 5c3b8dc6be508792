package main

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"
)

// stretch is a file of that many bytes that is nowhere in memory.
type stretch struct{ left int64 }

func (s *stretch) Read(p []byte) (int, error) {
	if s.left == 0 {
		return 0, io.EOF
	}
	n := min(int64(len(p)), s.left)
	s.left -= n
	return int(n), nil
}

func (w *world) put(t *testing.T, key, path string, body io.Reader) (int, string) {
	t.Helper()
	request, _ := http.NewRequest("PUT", w.http.URL+"/files?path="+path, body)
	request.Header.Set("Authorization", "Bearer lease")
	request.Header.Set("Idempotency-Key", key)
	answer, err := http.DefaultClient.Do(request)
	if err != nil {
		t.Fatal(err)
	}
	defer answer.Body.Close()
	text, _ := io.ReadAll(answer.Body)
	return answer.StatusCode, string(text)
}

func only(t *testing.T, folder string, names ...string) {
	t.Helper()
	found, err := os.ReadDir(folder)
	if err != nil || len(found) != len(names) {
		t.Errorf("%v %v, want %v", found, err, names)
	}
}

func TestLargeFileTravelsBothWaysInBoundedMemory(t *testing.T) {
	w, path := newWorld(t), filepath.Join(t.TempDir(), "x")
	w.lease(t)
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	const size = 200 << 20
	if status, text := w.put(t, "", path, &stretch{size}); status != 200 || !strings.Contains(text, fmt.Sprint(size)) {
		t.Fatal(status, text)
	}
	request, _ := http.NewRequest("GET", w.http.URL+"/files?path="+path, nil)
	request.Header.Set("Authorization", "Bearer lease")
	answer, err := http.DefaultClient.Do(request)
	if err != nil {
		t.Fatal(err)
	}
	defer answer.Body.Close()
	if n, err := io.Copy(io.Discard, answer.Body); n != size || err != nil {
		t.Error(n, err)
	}
	runtime.ReadMemStats(&after)
	if grown := after.TotalAlloc - before.TotalAlloc; grown > 10<<20 {
		t.Errorf("%d bytes were allocated", grown)
	}
}

func TestFileAboveTheConfiguredLimitLeavesNothing(t *testing.T) {
	w, folder := newWorld(t), t.TempDir()
	w.server.cfg.FileLimitBytes = 1000
	w.lease(t)
	for _, body := range []io.Reader{&stretch{1001}, bytes.NewReader(make([]byte, 1001))} { // of unknown and of known length
		if status, text := w.put(t, "", folder+"/x", body); status != 413 || !strings.Contains(text, "1000") {
			t.Error(status, text)
		}
	}
	only(t, folder)
	if status, text := w.put(t, "", folder+"/x", &stretch{1000}); status != 200 {
		t.Error(status, text)
	}
	if err := os.Truncate(folder+"/x", 1001); err != nil {
		t.Fatal(err)
	}
	if status, value := w.call(t, "GET", "/files?path="+folder+"/x", "lease", ""); status != 413 || code(value) != "TooLarge" {
		t.Error(status, value)
	}
}

type broken struct{}

func (broken) Read([]byte) (int, error) { return 0, syscall.ENOSPC }

func TestHalfAFileNeverHasItsName(t *testing.T) {
	folder := t.TempDir()
	if err := os.WriteFile(folder+"/old", []byte("old"), 0o644); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"old", "new"} {
		_, err := writeFile(folder+"/"+name, 0o600, io.MultiReader(strings.NewReader("half"), broken{}))
		if !errors.Is(err, syscall.ENOSPC) || classify(err).code != "BadRequest" {
			t.Error(name, err)
		}
	}
	only(t, folder, "old")
	if text, _ := os.ReadFile(folder + "/old"); string(text) != "old" {
		t.Errorf("%q", text)
	}
}

func TestWhatLinksLeadToIsReplacedAndTheLinksStay(t *testing.T) {
	folder := t.TempDir()
	for _, err := range []error{os.Mkdir(folder+"/a", 0o755), os.Symlink("a/../a/x", folder+"/link"), os.Symlink(folder+"/link", folder+"/second"),
		os.Symlink("loop", folder+"/loop"), os.Symlink("nowhere/x", folder+"/dangling"), syscall.Mkfifo(folder+"/pipe", 0o600)} {
		if err != nil {
			t.Fatal(err)
		}
	}
	for _, text := range []string{"made", "replaced"} {
		if _, err := writeFile(folder+"/second", 0o640, strings.NewReader(text)); err != nil {
			t.Fatal(err)
		}
		found, _ := os.ReadFile(folder + "/a/x")
		if info, _ := os.Lstat(folder + "/link"); string(found) != text || info.Mode()&os.ModeSymlink == 0 {
			t.Errorf("%q, %v", found, info.Mode())
		}
	}
	for name, want := range map[string]string{"loop": "BadRequest", "dangling": "NotFound", "pipe": "BadRequest", "a": "BadRequest"} {
		if _, err := writeFile(folder+"/"+name, 0o640, strings.NewReader("")); err == nil || classify(err).code != want {
			t.Error(name, err)
		}
	}
	for _, path := range []string{"/proc/self/comm", "/proc/self/fd/1", "/dev/null"} {
		if _, err := writeFile(path, 0o640, strings.NewReader("")); err == nil {
			t.Error(path, "was written")
		}
	}
}

func TestReplacedFileKeepsItsOwner(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("only root can have a file that belongs to somebody else")
	}
	path := filepath.Join(t.TempDir(), "x")
	if err := errors.Join(os.WriteFile(path, nil, 0o644), os.Chown(path, 1234, 5678)); err != nil {
		t.Fatal(err)
	}
	if _, err := writeFile(path, 0o644, strings.NewReader("y")); err != nil {
		t.Fatal(err)
	}
	info, _ := os.Stat(path)
	if owner := info.Sys().(*syscall.Stat_t); owner.Uid != 1234 || owner.Gid != 5678 {
		t.Error(owner.Uid, owner.Gid)
	}
}

func TestUploadUnderAKeyIsWrittenOnce(t *testing.T) {
	w, path := newWorld(t), filepath.Join(t.TempDir(), "x")
	w.lease(t)
	if status, text := w.put(t, "k", path, strings.NewReader("one")); status != 200 {
		t.Fatal(status, text)
	}
	if err := os.WriteFile(path, []byte("changed since"), 0o644); err != nil {
		t.Fatal(err)
	}
	if status, text := w.put(t, "k", path, strings.NewReader("one")); status != 200 || !strings.Contains(text, "3") {
		t.Error(status, text)
	}
	if status, text := w.put(t, "k", path, strings.NewReader("two")); status != 422 || !strings.Contains(text, "KeyReused") {
		t.Error(status, text)
	}
	if text, _ := os.ReadFile(path); string(text) != "changed since" {
		t.Errorf("%q", text)
	}
}

func TestUploadThatFailedMayBeRepeatedUnderItsKey(t *testing.T) {
	w, folder := newWorld(t), t.TempDir()
	w.lease(t)
	if err := os.Mkdir(folder+"/x", 0o755); err != nil {
		t.Fatal(err)
	}
	if status, text := w.put(t, "k", folder+"/x", strings.NewReader("one")); status != 400 {
		t.Fatal(status, text)
	}
	if err := os.Remove(folder + "/x"); err != nil {
		t.Fatal(err)
	}
	if status, text := w.put(t, "k", folder+"/x", strings.NewReader("one")); status != 200 {
		t.Error(status, text)
	}
}

func TestSecondUploadUnderAKeyWaitsForTheFirst(t *testing.T) {
	w, path := newWorld(t), filepath.Join(t.TempDir(), "x")
	w.lease(t)
	slow, pen := io.Pipe()
	answers := make(chan int, 2)
	go func() { status, _ := w.put(t, "k", path, slow); answers <- status }()
	eventually(t, "claimed", func() bool { return w.server.held.jobs.knows("k") })
	go func() { status, _ := w.put(t, "k", path, strings.NewReader("one")); answers <- status }()
	select {
	case status := <-answers:
		t.Error("answered early:", status)
	case <-time.After(100 * time.Millisecond):
	}
	_, _ = pen.Write([]byte("one"))
	pen.Close()
	if first, second := <-answers, <-answers; first != 200 || second != 200 {
		t.Error(first, second)
	}
}
