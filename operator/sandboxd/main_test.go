package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

const asPid1 = "SANDBOXD_TEST_PID1"

// TestMain runs the daemon instead of the tests when the test binary was started as PID 1: so the
// race detector sees the real thing.
func TestMain(m *testing.M) {
	if os.Getenv(asPid1) == "" {
		os.Exit(m.Run())
	}
	if err := syscall.Mount("proc", "/proc", "proc", 0, ""); err != nil {
		fmt.Fprintln(os.Stderr, "mount /proc:", err)
		os.Exit(1)
	}
	if err := run(3, "", "", -1); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

type daemon struct {
	command *exec.Cmd
	stdin   io.WriteCloser
	stderr  bytes.Buffer
	client  *http.Client
	scratch string
}

func startDaemon(t *testing.T) *daemon {
	t.Helper()
	d := &daemon{scratch: t.TempDir()}
	socket := filepath.Join(t.TempDir(), "s")
	listener, err := net.ListenUnix("unix", &net.UnixAddr{Name: socket, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	listener.SetUnlinkOnClose(false)
	file, err := listener.File()
	if err != nil {
		t.Fatal(err)
	}
	listener.Close()
	defer file.Close()
	d.command = exec.Command("/proc/self/exe")
	d.command.Env = append(os.Environ(), asPid1+"=1")
	d.command.ExtraFiles = []*os.File{file}
	d.command.Stderr = &d.stderr
	d.command.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags:  syscall.CLONE_NEWUSER | syscall.CLONE_NEWPID | syscall.CLONE_NEWNS | syscall.CLONE_NEWIPC,
		UidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getuid(), Size: 1}},
		GidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getgid(), Size: 1}},
	}
	if d.stdin, err = d.command.StdinPipe(); err != nil {
		t.Fatal(err)
	}
	if err := d.command.Start(); err != nil {
		t.Skip("namespaces are refused here:", err)
	}
	line, _ := json.Marshal(config{AdminToken: "admin", Scratch: []string{d.scratch}, Workdir: "/", Incarnation: 1})
	if _, err := d.stdin.Write(append(line, '\n')); err != nil {
		t.Fatal(err)
	}
	d.client = &http.Client{Timeout: 20 * time.Second, Transport: &http.Transport{
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "unix", socket)
		}}}
	t.Cleanup(func() { d.end(t) })
	return d
}

// end closes the daemon's standard input: it must exit by itself, and without a race report.
func (d *daemon) end(t *testing.T) {
	d.stdin.Close()
	ended := make(chan error, 1)
	go func() { ended <- d.command.Wait() }()
	select {
	case err := <-ended:
		if err != nil || d.stderr.Len() > 0 {
			t.Errorf("daemon: %v\n%s", err, d.stderr.String())
		}
	case <-time.After(5 * time.Second):
		_ = d.command.Process.Kill()
		t.Error("the daemon did not end with its owner")
	}
}

func (d *daemon) call(t *testing.T, path, token, body string) map[string]any {
	request, _ := http.NewRequest("POST", "http://d"+path, strings.NewReader(body))
	request.Header.Set("Authorization", "Bearer "+token)
	answer, err := d.client.Do(request)
	if err != nil {
		t.Error(err)
		return nil
	}
	defer answer.Body.Close()
	var value map[string]any
	if err := json.NewDecoder(bufio.NewReader(answer.Body)).Decode(&value); err != nil {
		t.Error(err)
	}
	return value
}

func (d *daemon) lease(t *testing.T, token string) {
	d.call(t, "/lease", "admin", fmt.Sprintf(`{"owner":"o","attempt":0,"token":%q,"ttlSeconds":60}`, token))
}

func TestDaemonRefusesToRunBesideOthers(t *testing.T) {
	if err := run(-1, "tcp://127.0.0.1:0", "", -1); err == nil || !strings.Contains(err.Error(), "pid: must be 1") {
		t.Error(err)
	}
}

func TestResetKillsWhatRunsAndEmptiesScratch(t *testing.T) {
	d := startDaemon(t)
	d.lease(t, "t")
	answer := d.call(t, "/exec", "t", fmt.Sprintf(`{"command":"setsid sleep 60 & touch %s/x; echo $$"}`, d.scratch))
	if answer["exitCode"] != 0.0 {
		t.Fatal(answer)
	}
	if answer := d.call(t, "/reset", "admin", "{}"); answer["clean"] != true {
		t.Fatal(answer)
	}
	if left, _ := os.ReadDir(d.scratch); len(left) != 0 {
		t.Error(left)
	}
	d.lease(t, "u")
	if answer := d.call(t, "/exec", "u", `{"command":"ls -d /proc/[0-9]*"}`); strings.Count(answer["stdout"].(string), "\n") > 3 {
		t.Error(answer) // the daemon, the shell, ls
	}
}

func TestZombiesAndOrphansAreReaped(t *testing.T) {
	d := startDaemon(t)
	d.lease(t, "t")
	d.call(t, "/exec", "t", `{"command":"for i in 1 2 3 4 5 6 7 8; do (setsid sh -c 'exit 0' &) ; done"}`)
	time.Sleep(100 * time.Millisecond)
	answer := d.call(t, "/exec", "t", `{"command":"cat /proc/[0-9]*/stat | grep -c ' Z '"}`)
	if answer["stdout"] != "0\n" {
		t.Error(answer)
	}
}

// Everything at once, for the race detector: commands, heartbeats, files, resets, expiries.
func TestManyCallersAtOnce(t *testing.T) {
	d := startDaemon(t)
	var callers sync.WaitGroup
	for caller := range 6 {
		callers.Add(1)
		go func() {
			defer callers.Done()
			for round := range 15 {
				switch caller {
				case 0:
					d.lease(t, "t")
				case 1:
					if round%5 == 4 {
						d.call(t, "/reset", "admin", "{}")
					}
				default:
					d.call(t, "/exec", "t", `{"command":"sleep 0.01 & yes | head -c 200000","timeoutSeconds":5}`)
				}
			}
		}()
	}
	callers.Wait()
	if answer := d.call(t, "/reset", "admin", "{}"); answer["clean"] != true {
		t.Error(answer)
	}
}
