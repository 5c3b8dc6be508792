package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
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

const (
	asPid1    = "SANDBOXD_TEST_PID1" // its value is an address to listen on, or inherited
	inherited = "fd"
	rootOf    = "SANDBOXD_TEST_ROOT" // an empty folder
	scratchOf = "SANDBOXD_TEST_SCRATCH"
)

// TestMain runs the daemon instead of the tests when the test binary was started as PID 1: so the
// race detector sees the real thing.
func TestMain(m *testing.M) {
	listen := os.Getenv(asPid1)
	if listen == "" {
		os.Exit(m.Run())
	}
	fd := -1
	if listen == inherited {
		fd, listen = 3, ""
	}
	if err := enterRoot(os.Getenv(rootOf), os.Getenv(scratchOf)); err != nil {
		fmt.Fprintln(os.Stderr, "root:", err)
		os.Exit(1)
	}
	if err := run(fd, listen, "", -1); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

// enterRoot makes a folder the root, with this machine's programs in it but without most of its mounts: others
// come and go meanwhile, and the daemon would find that its mount table has changed.
func enterRoot(root, scratch string) error {
	for _, folder := range []string{"/usr", "/bin", "/lib", "/lib64", "/sbin", "/etc", "/dev", scratch} {
		if target, err := os.Readlink(folder); err == nil {
			if err := os.Symlink(target, root+folder); err != nil {
				return err
			}
			continue
		}
		if err := os.MkdirAll(root+folder, 0o755); err != nil {
			return err
		}
		if err := syscall.Mount(folder, root+folder, "", syscall.MS_BIND|syscall.MS_REC, ""); err != nil {
			return fmt.Errorf("%s: %w", folder, err)
		}
	}
	if err := os.Mkdir(root+"/proc", 0o755); err != nil {
		return err
	}
	if err := syscall.Mount("proc", root+"/proc", "proc", 0, ""); err != nil {
		return err
	}
	return errors.Join(syscall.Chroot(root), os.Chdir("/"))
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
	return launchDaemon(t, inherited, 1, []*os.File{file}, "unix", socket)
}

// launchDaemon starts it as PID 1 of a user namespace with that many users, and talks to it at an address.
func launchDaemon(t *testing.T, listen string, users int, files []*os.File, network, address string) *daemon {
	t.Helper()
	d := &daemon{scratch: t.TempDir()}
	d.command = exec.Command("/proc/self/exe")
	d.command.Env = append(os.Environ(), asPid1+"="+listen, rootOf+"="+t.TempDir(), scratchOf+"="+d.scratch)
	d.command.ExtraFiles = files
	d.command.Stderr = &d.stderr
	d.command.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags:                 syscall.CLONE_NEWUSER | syscall.CLONE_NEWPID | syscall.CLONE_NEWNS | syscall.CLONE_NEWIPC,
		UidMappings:                []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getuid(), Size: users}},
		GidMappings:                []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getgid(), Size: users}},
		GidMappingsEnableSetgroups: users > 1,
	}
	if users > 1 { // with a group that no command is to have
		d.command.SysProcAttr.Credential = &syscall.Credential{Groups: []uint32{7}}
	}
	var err error
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
			return (&net.Dialer{}).DialContext(ctx, network, address)
		}}}
	t.Cleanup(func() { d.end(t) })
	eventually(t, "listens", func() bool {
		conn, err := net.Dial(network, address)
		if err == nil {
			conn.Close()
		}
		return err == nil
	})
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

func TestItListensOnTCP(t *testing.T) {
	tcp := freeAddress(t)
	d := launchDaemon(t, "tcp://"+tcp, 1, nil, "tcp", tcp)
	d.lease(t, "t")
	if answer := d.call(t, "/exec", "t", `{"command":"echo $((6*7))"}`); answer["stdout"] != "42\n" {
		t.Error(answer)
	}
}

func freeAddress(t *testing.T) string {
	t.Helper()
	probe, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer probe.Close()
	return probe.Addr().String()
}

func TestCommandRunsAsAnotherUserWhereThereAreSome(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("only root can make a namespace with several users")
	}
	tcp := freeAddress(t)
	d := launchDaemon(t, "tcp://"+tcp, 65536, nil, "tcp", tcp)
	d.lease(t, "t")
	for user, want := range map[string]string{"nobody": "65534 65534 65534 /nonexistent\n", "4242:17": "4242 17 17\n"} {
		body := fmt.Sprintf(`{"command":"echo $(id -u) $(id -g) $(id -G) $HOME","user":%q}`, user)
		if answer := d.call(t, "/exec", "t", body); answer["stdout"] != want {
			t.Error(user, answer)
		}
	}
	answer := d.call(t, "/exec", "t", `{"command":"kill -9 1; id -u; echo x > /proc/1/oom_score_adj","user":"nobody"}`)
	if text, _ := answer["stderr"].(string); answer["stdout"] != "65534\n" || !strings.Contains(text, "ermi") {
		t.Error(answer)
	}
	alone := startDaemon(t)
	alone.lease(t, "t")
	if answer := alone.call(t, "/exec", "t", `{"command":"id","user":"root"}`); !strings.Contains(fmt.Sprint(answer), "single user id") {
		t.Error(answer)
	}
}

func TestCancelKillsTheWholeGroup(t *testing.T) {
	d := startDaemon(t)
	d.lease(t, "t")
	begun := d.call(t, "/exec", "t", `{"command":"sleep 60 & sleep 60 & echo on; wait","waitSeconds":0.2,"timeoutSeconds":60}`)
	if begun["running"] != true || begun["stdout"] != "on\n" {
		t.Fatal(begun)
	}
	request, _ := http.NewRequest("DELETE", "http://d/exec/"+begun["id"].(string), nil)
	request.Header.Set("Authorization", "Bearer t")
	answer, err := d.client.Do(request)
	if err != nil || answer.StatusCode != 200 {
		t.Fatal(answer, err)
	}
	answer.Body.Close()
	left := d.call(t, "/exec", "t", `{"command":"while cat /proc/[0-9]*/comm | grep -q sleep; do :; done"}`)
	if left["exitCode"] != 0.0 {
		t.Error(left)
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
