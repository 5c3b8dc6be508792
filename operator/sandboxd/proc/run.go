package proc

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"syscall"
	"time"
)

// Exit codes of a shell for what could not run.
const (
	exitCannotRun = 126
	exitNotFound  = 127
)

// Spec is one command.
type Spec struct {
	Argv    []string
	Env     []string // NAME=value; the daemon's own environment is not inherited
	Dir     string
	Stdin   string
	Timeout time.Duration
	Stdout  *Output
	Stderr  *Output
	User    *User // nil for the daemon's own
}

// User is who a command runs as.
type User struct {
	UID, GID uint32
	Groups   []uint32 // supplementary ones
}

// Result is how a command ended. Signal is 0 unless a signal ended it.
type Result struct {
	ExitCode  int
	Signal    int
	TimedOut  bool
	Wall, CPU time.Duration
}

// Run starts the command and waits for its end, its timeout, or the end of ctx; in the last two
// cases the whole group is killed first. A command that cannot be found or run is a result. The outputs of
// the Spec fill up meanwhile; they are closed when Run returns.
func (t *Table) Run(ctx context.Context, spec Spec) (Result, error) {
	defer spec.Stdout.Close()
	defer spec.Stderr.Close()
	began := time.Now()
	path, err := lookup(spec.Argv[0], spec.Env, spec.Dir)
	if err != nil {
		return failed(err, spec), nil
	}
	streams, err := openStreams(spec.Stdin)
	if err != nil {
		return Result{}, err
	}
	prepared, err := prepare(path, spec, streams.child)
	if err != nil {
		streams.close()
		return failed(err, spec), nil
	}
	c := &child{launch: prepared, ended: make(chan struct{}), exec: make(chan error, 1)}
	timedOut, err := t.follow(ctx, c, streams, spec)
	switch {
	case errors.Is(err, ErrClosed), errors.Is(err, ErrStuck):
		return Result{}, err
	case err != nil:
		return failed(err, spec), nil
	}
	if failure := c.failure(); failure != nil {
		return failed(failure, spec), ctx.Err()
	}

	result := Result{TimedOut: timedOut, Wall: time.Since(began)}
	result.ExitCode = c.status.ExitStatus()
	if c.status.Signaled() {
		result.Signal = int(c.status.Signal())
		result.ExitCode = 128 + result.Signal
	}
	result.CPU = time.Duration(c.usage.Utime.Nano() + c.usage.Stime.Nano())
	return result, ctx.Err()
}

// follow starts a child and waits for its end and its output. The start is not waited for alone: a command
// that is held up before its exec ends at its timeout like any other.
func (t *Table) follow(ctx context.Context, c *child, s *streams, spec Spec) (timedOut bool, err error) {
	started := make(chan error, 1)
	go func() { started <- t.start(ctx, c) }()
	limit := time.NewTimer(spec.Timeout)
	defer limit.Stop()
	var drained, reading <-chan struct{} // the same, but for nil once it was seen
	var stuck <-chan time.Time
	cancelled, ended := ctx.Done(), c.ended
	for started != nil || ended != nil {
		select {
		case <-reading:
			reading = nil
			t.Reap() // most end with their output: this is sooner than the signal that tells
			continue
		case err := <-started:
			if err != nil {
				s.close()
				return false, err
			}
			started = nil
			drained = s.run(spec)
			reading = drained
			continue
		case <-ended:
			ended = nil
			continue
		case <-cancelled:
			cancelled = nil
		case <-limit.C:
			timedOut = true
		case <-stuck:
			s.stopStdin()
			if started != nil {
				go func() { <-started; s.close() }()
			}
			return timedOut, fmt.Errorf("%w: %d, %v after SIGKILL", ErrStuck, atomic.LoadInt32(&c.pid), KillWait)
		}
		t.kill(c)
		stuck = time.After(KillWait)
	}
	s.stopStdin()
	select {
	case <-drained:
	case <-time.After(Grace):
	}
	return timedOut, nil
}

// failure is why an ended child never became the command; nil if it did.
func (c *child) failure() error {
	switch {
	case c.failurePipe == 0 && c.errno != 0:
		return c.errno
	case c.failurePipe == 0, c.status.Signaled(), c.status.ExitStatus() != childFailed:
		return nil
	}
	return <-c.exec // it has ended, so it has told or never will
}

// lookup finds a bare name in the PATH of the command's own environment.
func lookup(name string, env []string, dir string) (string, error) {
	if strings.Contains(name, "/") {
		return name, nil
	}
	for _, entry := range env {
		paths, found := strings.CutPrefix(entry, "PATH=")
		if !found {
			continue
		}
		for _, folder := range filepath.SplitList(paths) {
			path := filepath.Join(folder, name)
			if !filepath.IsAbs(path) {
				path = filepath.Join(dir, path)
			}
			if info, err := os.Stat(path); err == nil && info.Mode().IsRegular() && info.Mode()&0o111 != 0 {
				return path, nil
			}
		}
	}
	return "", syscall.ENOENT
}

func failed(err error, spec Spec) Result {
	code, why := exitCannotRun, err.Error()
	switch {
	case errors.Is(err, syscall.ENOENT):
		code, why = exitNotFound, "command not found"
	case errors.Is(err, syscall.EAGAIN):
		why = "no process can be started: the sandbox is at its limit of processes"
	}
	fmt.Fprintf(spec.Stderr, "sandboxd: %s: %s\n", spec.Argv[0], why)
	return Result{ExitCode: code}
}
