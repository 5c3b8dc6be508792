package proc

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
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
	c, err := t.start(ctx, path, spec, streams.childEnds())
	if err != nil {
		streams.close()
		if errors.Is(err, ErrClosed) {
			return Result{}, err
		}
		return failed(err, spec), nil
	}
	stdout, stderr := streams.run(spec)
	timedOut, err := t.wait(ctx, c, spec.Timeout)
	streams.stopStdin()
	if err != nil {
		return Result{}, err
	}
	if failure := c.failure(); failure != nil {
		return failed(failure, spec), ctx.Err()
	}
	awaitEnd(Grace, stdout, stderr)

	result := Result{TimedOut: timedOut, Wall: time.Since(began)}
	result.ExitCode = c.status.ExitStatus()
	if c.status.Signaled() {
		result.Signal = int(c.status.Signal())
		result.ExitCode = 128 + result.Signal
	}
	result.CPU = time.Duration(c.usage.Utime.Nano() + c.usage.Stime.Nano())
	return result, ctx.Err()
}

func (t *Table) wait(ctx context.Context, c *child, timeout time.Duration) (timedOut bool, err error) {
	limit := time.NewTimer(timeout)
	defer limit.Stop()
	select {
	case <-c.ended:
		return false, nil
	case <-ctx.Done():
	case <-limit.C:
		timedOut = true
	}
	t.kill(c)
	stuck := time.NewTimer(KillWait)
	defer stuck.Stop()
	select {
	case <-c.ended:
		return timedOut, nil
	case <-stuck.C:
		return timedOut, fmt.Errorf("%w: %d, %v after SIGKILL", ErrStuck, c.pid, KillWait)
	}
}

// failure is why an ended child never became the command; nil if it did.
func (c *child) failure() error {
	if c.status.Signaled() || c.status.ExitStatus() != childFailed {
		return nil
	}
	return <-c.exec // it has ended, so it has told or never will
}

func awaitEnd(grace time.Duration, outputs ...<-chan struct{}) {
	limit := time.NewTimer(grace)
	defer limit.Stop()
	for _, done := range outputs {
		select {
		case <-done:
		case <-limit.C:
			return
		}
	}
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
