package main

import (
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

// offer accepts one connection and sends these descriptors over it.
func offer(t *testing.T, fds ...int) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "s")
	owner, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	sent := make(chan struct{})
	go func() {
		defer close(sent)
		conn, err := owner.AcceptUnix()
		if err != nil {
			return
		}
		defer conn.Close()
		var rights []byte
		if len(fds) > 0 {
			rights = syscall.UnixRights(fds...)
		}
		_, _, _ = conn.WriteMsgUnix([]byte("x"), rights, nil)
	}()
	t.Cleanup(func() { owner.Close(); <-sent })
	return path
}

func file(t *testing.T, source interface{ File() (*os.File, error) }) int {
	t.Helper()
	file, err := source.File()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { file.Close() })
	return int(file.Fd())
}

func TestListenerAndCounterAreTakenOver(t *testing.T) {
	listening, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer listening.Close()
	events, err := os.Create(filepath.Join(t.TempDir(), "memory.events"))
	if err != nil {
		t.Fatal(err)
	}
	defer events.Close()
	_, _ = events.WriteString("oom 3\noom_kill 2\n")
	taken, oom, err := receive(offer(t, file(t, listening.(*net.TCPListener)), int(events.Fd())))
	if err != nil {
		t.Fatal(err)
	}
	defer taken.Close()
	if oom.read() != 2 {
		t.Error("the counter of out-of-memory kills was not taken over:", oom.read())
	}
	go func() {
		_ = http.Serve(taken, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			_, _ = io.WriteString(w, "mine")
		}))
	}()
	answer, err := http.Get("http://" + listening.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer answer.Body.Close()
	if body, _ := io.ReadAll(answer.Body); string(body) != "mine" {
		t.Errorf("answer: %q", body)
	}
}

func TestHandoverWithoutDescriptorsOrOwnerIsAnError(t *testing.T) {
	if _, _, err := receive(offer(t)); err == nil || !strings.Contains(err.Error(), "--handover: the owner sent no descriptor") {
		t.Error(err)
	}
	if _, _, err := receive(filepath.Join(t.TempDir(), "nobody")); err == nil || !strings.HasPrefix(err.Error(), "--handover: ") {
		t.Error(err)
	}
}
