// Package proc starts and ends every process of the sandbox. The daemon is PID 1, or next to one that only keeps it,
// so there is one place that reaps, and it is here.
//
// Guarantees:
//  1. A child is registered before it exists, and reaped and recorded under one lock: a signal never
//     meets a recycled pid, and no end is missed.
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
	"slices"
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

	prSetChildSubreaper = 36
)

// ErrClosed says that no process may start now: there is no lease.
var ErrClosed = errors.New("no process may start: the sandbox holds no lease")

// ErrStuck says that a process outlived its SIGKILL by KillWait.
var ErrStuck = errors.New("a killed process does not end")

type child struct {
	*launch
	pid    int32 // written by the kernel before the child runs; 0 until then
	ended  chan struct{}
	exec   chan error // how the exec of a forked one went, one value; the group may be killed before that
	status syscall.WaitStatus
	usage  syscall.Rusage
}

// Table is the set of processes that the daemon starts, and has not reaped yet.
type Table struct {
	quick chan struct{} // held by a start that waits for its exec
	score bool          // whether /proc can be written, where victimScore goes
	kept  bool          // PID 1 is a keeper's, whom kill(-1) spares as it spares this process

	mu       sync.Mutex // guards what follows
	open     bool
	children map[*child]struct{}
}

// NewTable returns an empty, closed table.
func NewTable() *Table {
	const writable = 2 // W_OK
	err := syscall.Access("/proc/self/oom_score_adj", writable)
	return &Table{children: map[*child]struct{}{}, quick: make(chan struct{}, quickStarts),
		score: !errors.Is(err, syscall.EROFS) && !errors.Is(err, syscall.ENOENT)}
}

// Kept is for a daemon that is not PID 1 itself but a child of it, and shall kill all the same. Orphans become its
// own children then.
func (t *Table) Kept() error {
	if os.Getppid() != 1 {
		return fmt.Errorf("pid: the parent is %d: a daemon that is not PID 1 must be a child of it", os.Getppid())
	}
	if _, _, errno := syscall.RawSyscall(syscall.SYS_PRCTL, prSetChildSubreaper, 1, 0); errno != 0 {
		return fmt.Errorf("prctl: PR_SET_CHILD_SUBREAPER: %w", errno)
	}
	t.kept = true
	return nil
}

// Open allows starts; it is called when a lease is taken.
func (t *Table) Open() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.open = true
}

// start returns once the child runs its command, has failed to, or, forked, is on its way there.
func (t *Table) start(ctx context.Context, c *child) error {
	c.score = t.score
	if err := t.register(ctx, c); err != nil {
		return err
	}
	var err error
	select {
	case t.quick <- struct{}{}:
		err = c.quick(&c.pid)
		<-t.quick
	default:
		var told *os.File
		if told, err = c.slow(&c.pid); err == nil {
			go func() { c.exec <- outcome(told) }()
		}
	}
	if err != nil {
		t.mu.Lock()
		defer t.mu.Unlock()
		delete(t.children, c)
		return err
	}
	if atomic.LoadUint32(&c.killed) != 0 { // before the kernel had told its pid, perhaps
		t.kill(c)
	}
	if t.score && !c.victim { // it may lack the right before its exec
		_ = os.WriteFile("/proc/"+strconv.Itoa(int(c.pid))+"/oom_score_adj", victimScore, 0)
	}
	return nil
}

// register refuses once ctx has ended: its lease may have ended long ago, and the table be open for the next.
func (t *Table) register(ctx context.Context, c *child) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if !t.open || ctx.Err() != nil {
		return ErrClosed
	}
	t.children[c] = struct{}{}
	return nil
}

// kill ends the group of a child that has not been reaped: afterwards its pid may be another's. One that does
// not exist yet will see that it is not to run.
func (t *Table) kill(c *child) {
	t.mu.Lock()
	defer t.mu.Unlock()
	atomic.StoreUint32(&c.killed, 1) // also for one that is not registered yet: it is killed once
	if _, there := t.children[c]; !there {
		return
	}
	pid := int(atomic.LoadInt32(&c.pid))
	if pid == 0 {
		return
	}
	if err := syscall.Kill(-pid, syscall.SIGKILL); errors.Is(err, syscall.ESRCH) {
		_ = syscall.Kill(pid, syscall.SIGKILL) // it has no group yet
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
		for c := range t.children {
			if int(atomic.LoadInt32(&c.pid)) == pid {
				c.status, c.usage = status, usage
				delete(t.children, c)
				close(c.ended)
				break
			}
		}
	}
}

// close refuses every later start.
func (t *Table) close() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.open = false
}

func (t *Table) empty() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return len(t.children) == 0
}

// KillAll closes the table and kills until nobody is left. One kill(-1) is atomic against fork,
// so a fork bomb cannot outrun it; the loop is for what was dying already.
func (t *Table) KillAll(wait time.Duration) error {
	t.close()
	if os.Getpid() != 1 && !t.kept {
		return errors.New("kill(-1) refused: the daemon is not PID 1 of a sandbox")
	}
	deadline := time.Now().Add(wait)
	for pause := 50 * time.Microsecond; ; pause = min(2*pause, 5*time.Millisecond) {
		err := syscall.Kill(-1, syscall.SIGKILL)
		t.Reap()
		left, listErr := Others()
		if errors.Is(err, syscall.ESRCH) && listErr == nil && len(left) == 0 && t.empty() {
			return nil
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("processes: %d left %v after SIGKILL", len(left), wait)
		}
		time.Sleep(pause)
	}
}

// Kill closes the table and kills everybody once, without waiting. What is killed starts no process any more, so that
// the next sandbox may be made while this one dies.
func (t *Table) Kill() error {
	t.close()
	if os.Getpid() != 1 {
		return errors.New("kill(-1) refused: not PID 1")
	}
	if err := syscall.Kill(-1, syscall.SIGKILL); err != nil && !errors.Is(err, syscall.ESRCH) {
		return fmt.Errorf("kill(-1): %w", err)
	}
	return nil
}

// Left waits until no process but this and one other is left, and kills whoever came meanwhile.
func (t *Table) Left(other int, wait time.Duration) error {
	deadline := time.Now().Add(wait)
	for pause := 50 * time.Microsecond; ; pause = min(2*pause, 5*time.Millisecond) {
		t.Reap()
		left, err := Others()
		left = slices.DeleteFunc(left, func(pid int) bool { return pid == other })
		if err == nil && len(left) == 0 {
			return nil
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("processes: %d left %v after SIGKILL", len(left), wait)
		}
		for _, pid := range left {
			_ = syscall.Kill(pid, syscall.SIGKILL)
		}
		time.Sleep(pause)
	}
}

// Others lists every process of the sandbox but PID 1 and this one.
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
		if pid, err := strconv.Atoi(name); err == nil && pid != 1 && pid != os.Getpid() {
			pids = append(pids, pid)
		}
	}
	return pids, nil
}
