package proc

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"
)

// trap is a program that nobody can open, and so not run, while the test holds a lease on it.
func trap(t *testing.T) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "trap")
	if err := os.WriteFile(path, []byte("#!/bin/sh\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	file, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { file.Close() })
	const setLease = 1024 // F_SETLEASE
	if _, _, errno := syscall.Syscall(syscall.SYS_FCNTL, file.Fd(), setLease, syscall.F_WRLCK); errno != 0 {
		t.Skip("this file system has no leases: ", errno)
	}
	return path
}

func TestStartsThatAreHeldUpHoldUpNobodyElse(t *testing.T) {
	table, held := opened(t), trap(t)
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	failures := make(chan error, quickStarts+2) // more than may wait, so some of them are forked
	for range cap(failures) {
		go func() {
			spec := shell("")
			spec.Argv = []string{held}
			_, err := table.Run(ctx, spec)
			failures <- err
		}()
	}
	for len(table.quick) < quickStarts {
		time.Sleep(time.Millisecond)
	}
	runtime.GC() // it waits for every thread that is not known to be in the kernel
	began := time.Now()
	if result := run(t, table, shell("exit 3")); result.ExitCode != 3 || time.Since(began) > 5*time.Second {
		t.Errorf("%+v after %v", result, time.Since(began))
	}
	spec := shell("")
	spec.Argv, spec.Timeout = []string{held}, 100*time.Millisecond
	if result := run(t, table, spec); !result.TimedOut || result.Signal != 9 {
		t.Errorf("%+v", result)
	}
	cancel()
	for range cap(failures) {
		if err := <-failures; !errors.Is(err, context.Canceled) {
			t.Error(err)
		}
	}
	if !table.empty() || len(table.quick) != 0 {
		t.Error("something is left:", len(table.children), len(table.quick))
	}
}

func TestForkedAndQuickChildrenAreAlike(t *testing.T) {
	table := opened(t)
	look := "cat /proc/self/oom_score_adj; ulimit -n; ls /proc/self/fd | wc -l; pwd; echo $PATH; grep Sig[BIC] /proc/self/status"
	var seen []string
	for _, taken := range []int{0, quickStarts} {
		for range taken {
			table.quick <- struct{}{}
		}
		spec := shell(look)
		spec.Dir = "/tmp"
		run(t, table, spec)
		seen = append(seen, kept(spec.Stdout))
		for name, want := range map[string]int{"/nothing": 127, "/etc/passwd": 126} {
			spec := shell("")
			spec.Argv = []string{name}
			if result := run(t, table, spec); result.ExitCode != want || kept(spec.Stderr) == "" {
				t.Errorf("%s: %+v", name, result)
			}
		}
	}
	if seen[0] != seen[1] || !strings.HasPrefix(seen[0], "500\n1024\n") {
		t.Errorf("%q\n%q", seen[0], seen[1])
	}
	score, _ := os.ReadFile("/proc/self/oom_score_adj")
	if string(score) == "500\n" {
		t.Error("the score of a child became the daemon's")
	}
}

func TestChildThatIsKilledBeforeItExistsNeverRuns(t *testing.T) {
	table, held := opened(t), trap(t)
	for _, taken := range []int{0, quickStarts} {
		for range taken {
			table.quick <- struct{}{}
		}
		streams, err := openStreams("")
		if err != nil {
			t.Fatal(err)
		}
		spec := shell("")
		prepared, err := prepare(held, spec, streams.child) // it would wait there for ever
		if err != nil {
			t.Fatal(err)
		}
		c := &child{launch: prepared, ended: make(chan struct{}), exec: make(chan error, 1)}
		table.children[c] = struct{}{}
		table.kill(c)
		if timedOut, err := table.follow(context.Background(), c, streams, spec); timedOut || err != nil {
			t.Fatal(timedOut, err)
		}
		if !c.status.Signaled() || c.status.Signal() != syscall.SIGKILL {
			t.Error(c.status)
		}
	}
}
