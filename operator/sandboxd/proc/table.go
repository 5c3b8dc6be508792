// Package proc starts and ends every process of the sandbox. The daemon is PID 1, so there is
// one place that reaps, and it is here.
//
// Guarantees:
//  1. Start and registration happen under one lock, and so do reaping and recording: a signal
//     never meets a recycled pid.
//  2. A command is a process group of its own; timeout, cancel and lease loss kill the whole group.
//  3. Output is bounded; what is over the bound is drained, not kept.
//  4. A background process that holds the output pipes delays an answer by Grace at most.
//  5. After KillAll no process but the daemon is left, and none can be started until Open.
package proc

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
)

// Bounds of every wait of this package.
const (
	// Grace is how long the output of a command is awaited after the command itself has ended.
	Grace = 200 * time.Millisecond
	// KillWait is how long a killed process may take to die (it may sit in an uninterruptible call).
	KillWait = 5 * time.Second
	// victimScore makes the kernel's out-of-memory killer choose a command before the daemon.
	victimScore = "500"
)

// ErrClosed says that no process may start now: there is no lease.
var ErrClosed = errors.New("no process may start: the sandbox holds no lease")

// ErrStuck says that a process outlived its SIGKILL by KillWait.
var ErrStuck = errors.New("a killed process does not end")

type child struct {
	pid    int
	ended  chan struct{}
	exec   chan error // how the exec went, one value; the group may be killed before that
	status syscall.WaitStatus
	usage  syscall.Rusage
}

// Table is the set of processes that the daemon started and has not reaped yet.
type Table struct {
	mu       sync.Mutex
	open     atomic.Bool
	children map[int]*child
}

// NewTable returns an empty, closed table.
func NewTable() *Table { return &Table{children: map[int]*child{}} }

// Open allows starts; it is called when a lease is taken.
func (t *Table) Open() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.open.Store(true)
}

// start refuses once ctx has ended: its lease may have ended long ago, and the table be open for the next.
func (t *Table) start(ctx context.Context, path string, spec Spec, files [3]uintptr) (*child, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if !t.open.Load() || ctx.Err() != nil {
		return nil, ErrClosed
	}
	pid, told, err := spawn(path, spec, files)
	if err != nil {
		return nil, err
	}
	c := &child{pid: pid, ended: make(chan struct{}), exec: make(chan error, 1)}
	t.children[pid] = c
	go func() { c.exec <- outcome(told) }()
	// Raising one's own likelihood is allowed to everybody; where /proc says no, nothing is lost.
	_ = os.WriteFile("/proc/"+strconv.Itoa(pid)+"/oom_score_adj", []byte(victimScore), 0)
	return c, nil
}

// kill ends the group of a child that has not been reaped: afterwards its pid may be another's.
func (t *Table) kill(c *child) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.children[c.pid] == c {
		_ = syscall.Kill(-c.pid, syscall.SIGKILL)
	}
}

// Reap collects every ended process, adopted orphans included. Call it on each SIGCHLD.
func (t *Table) Reap() {
	t.mu.Lock()
	defer t.mu.Unlock()
	for {
		var status syscall.WaitStatus
		var usage syscall.Rusage
		pid, err := syscall.Wait4(-1, &status, syscall.WNOHANG, &usage)
		if errors.Is(err, syscall.EINTR) {
			continue
		}
		if err != nil || pid <= 0 {
			return
		}
		if c := t.children[pid]; c != nil {
			c.status, c.usage = status, usage
			delete(t.children, pid)
			close(c.ended)
		}
	}
}

// KillAll closes the table and kills until nobody is left. One kill(-1) is atomic against fork,
// so a fork bomb cannot outrun it; the loop is for what was dying already.
func (t *Table) KillAll(wait time.Duration) error {
	t.open.Store(false)
	if os.Getpid() != 1 {
		return errors.New("kill(-1) refused: the daemon is not PID 1 of a sandbox")
	}
	deadline := time.Now().Add(wait)
	for pause := 50 * time.Microsecond; ; pause = min(2*pause, 5*time.Millisecond) {
		err := syscall.Kill(-1, syscall.SIGKILL)
		t.Reap()
		left, listErr := Others()
		if errors.Is(err, syscall.ESRCH) && listErr == nil && len(left) == 0 {
			return nil
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("processes: %d left %v after SIGKILL", len(left), wait)
		}
		time.Sleep(pause)
	}
}

// Others lists every process of the sandbox but PID 1.
func Others() ([]int, error) {
	proc, err := os.Open("/proc")
	if err != nil {
		return nil, err
	}
	defer proc.Close()
	names, err := proc.Readdirnames(-1)
	if err != nil {
		return nil, err
	}
	var pids []int
	for _, name := range names {
		if pid, err := strconv.Atoi(name); err == nil && pid != 1 {
			pids = append(pids, pid)
		}
	}
	return pids, nil
}
