package proc

import (
	"context"
	"errors"
	"os"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

// opened is a table with somebody who reaps, as in main.
func opened(t testing.TB) *Table {
	t.Helper()
	table, ended := NewTable(), make(chan os.Signal, 1)
	signal.Notify(ended, syscall.SIGCHLD)
	go func() {
		for range ended {
			table.Reap()
		}
	}()
	t.Cleanup(func() { signal.Stop(ended); close(ended) })
	table.Open()
	return table
}

func shell(line string) Spec {
	return Spec{Argv: []string{"/bin/sh", "-c", line}, Env: []string{"PATH=/usr/bin:/bin"}, Dir: "/",
		Timeout: 10 * time.Second, Stdout: NewOutput(1000), Stderr: NewOutput(1000)}
}

func run(t *testing.T, table *Table, spec Spec) Result {
	t.Helper()
	result, err := table.Run(context.Background(), spec)
	if err != nil {
		t.Fatal(err)
	}
	return result
}

func kept(o *Output) string {
	text, _ := o.Kept()
	return string(text)
}

func cut(o *Output) bool {
	_, truncated := o.Kept()
	return truncated
}

func alive(pid int) bool { return syscall.Kill(pid, 0) == nil }

func writtenPid(t *testing.T, file string) int {
	t.Helper()
	for range 200 {
		if text, err := os.ReadFile(file); err == nil && strings.HasSuffix(string(text), "\n") {
			pid, err := strconv.Atoi(strings.TrimSpace(string(text)))
			if err != nil {
				t.Fatal(err)
			}
			return pid
		}
		time.Sleep(10 * time.Millisecond)
	}
	t.Fatal("no pid was written")
	return 0
}

func TestExitCodes(t *testing.T) {
	table := opened(t)
	for line, want := range map[string][2]int{"exit 7": {7, 0}, "kill -TERM $$": {143, 15}, "no-such-command": {127, 0}} {
		if result := run(t, table, shell(line)); result.ExitCode != want[0] || result.Signal != want[1] {
			t.Errorf("%s: exit %d signal %d", line, result.ExitCode, result.Signal)
		}
	}
}

func TestCommandThatCannotStartIsAResult(t *testing.T) {
	table := opened(t)
	for name, want := range map[string]int{"nothing": 127, "/nothing": 127, "/etc/passwd": 126} {
		spec := shell("")
		spec.Argv = []string{name}
		if result := run(t, table, spec); result.ExitCode != want || kept(spec.Stderr) == "" {
			t.Errorf("%s: %+v", name, result)
		}
	}
}

// 1. Start and registration under one lock.

func TestEveryEndOfManyShortCommandsIsSeen(t *testing.T) {
	table := opened(t)
	failures := make(chan error, 64)
	for range cap(failures) {
		go func() {
			_, err := table.Run(context.Background(), shell("exit 0"))
			failures <- err
		}()
	}
	for range cap(failures) {
		if err := <-failures; err != nil {
			t.Error(err)
		}
	}
	if len(table.children) != 0 {
		t.Errorf("%d children are still registered", len(table.children))
	}
}

// 2. Timeout and cancel kill the whole group.

func TestTimeoutAndCancelKillGrandchildren(t *testing.T) {
	table := opened(t)
	for _, way := range []string{"timeout", "cancel"} {
		file := filepath.Join(t.TempDir(), "pid")
		spec := shell("sh -c 'trap \"\" TERM; sleep 60 & echo $! > " + file + "; wait' & wait")
		ctx, cancel := context.WithCancel(context.Background())
		if way == "timeout" {
			spec.Timeout = 300 * time.Millisecond
		} else {
			time.AfterFunc(300*time.Millisecond, cancel)
		}
		result, err := table.Run(ctx, spec)
		cancel()
		if way == "timeout" && (err != nil || !result.TimedOut || result.Signal != 9) {
			t.Errorf("timeout: %+v %v", result, err)
		}
		if way == "cancel" && !errors.Is(err, context.Canceled) {
			t.Errorf("cancel: %v", err)
		}
		pid := writtenPid(t, file)
		for range 100 {
			if !alive(pid) {
				break
			}
			time.Sleep(10 * time.Millisecond)
		}
		if state, _ := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat"); alive(pid) && !strings.Contains(string(state), ") Z ") {
			t.Errorf("%s: the grandchild lives: %s", way, state)
		}
	}
}

// 3. Output is bounded.

func TestFloodIsDrainedAndCut(t *testing.T) {
	spec := shell("yes | head -c 20000000; echo end >&2")
	run(t, opened(t), spec)
	if spec.Stdout.Len() != 1000 || !cut(spec.Stdout) || kept(spec.Stderr) != "end\n" || cut(spec.Stderr) {
		t.Errorf("%d bytes, %v, %q", spec.Stdout.Len(), cut(spec.Stdout), kept(spec.Stderr))
	}
}

func TestOutputOfExactlyTheLimitIsNotCut(t *testing.T) {
	spec := shell("head -c 1000 /dev/zero")
	if run(t, opened(t), spec); spec.Stdout.Len() != 1000 || cut(spec.Stdout) {
		t.Errorf("%d bytes, %v", spec.Stdout.Len(), cut(spec.Stdout))
	}
}

// 4. A background process does not hold the answer.

func TestBackgroundProcessDelaysByTheGraceAtMost(t *testing.T) {
	file := filepath.Join(t.TempDir(), "pid")
	spec := shell("sleep 30 & echo $! > " + file + "; echo now")
	result := run(t, opened(t), spec)
	pid := writtenPid(t, file)
	defer syscall.Kill(pid, syscall.SIGKILL)
	if kept(spec.Stdout) != "now\n" || result.Wall > 5*time.Second {
		t.Errorf("%q after %v", kept(spec.Stdout), result.Wall)
	}
	if !alive(pid) {
		t.Error("the background process was killed")
	}
}

// 5. Nothing starts without a lease, and only PID 1 kills everything.

func TestClosedTableStartsNothing(t *testing.T) {
	_, err := NewTable().Run(context.Background(), shell("true"))
	if !errors.Is(err, ErrClosed) {
		t.Errorf("%v", err)
	}
}

func TestNothingStartsOnceItsContextHasEnded(t *testing.T) {
	table, proof := opened(t), filepath.Join(t.TempDir(), "proof")
	ctx, cancel := context.WithCancel(context.Background())
	cancel() // its lease has ended; the table is open for the next one
	if _, err := table.Run(ctx, shell("touch "+proof)); !errors.Is(err, ErrClosed) {
		t.Fatalf("got %v, want ErrClosed", err)
	}
	if _, err := os.Stat(proof); err == nil {
		t.Fatal("the command ran")
	}
}

func TestKillAllIsRefusedOutsideOfASandbox(t *testing.T) {
	table := opened(t)
	if err := table.KillAll(time.Second); err == nil || !strings.Contains(err.Error(), "not PID 1") {
		t.Fatal("kill(-1) was not refused")
	}
	if _, err := table.Run(context.Background(), shell("true")); !errors.Is(err, ErrClosed) {
		t.Error("the table stayed open")
	}
}

func TestStdinThatNobodyReadsEnds(t *testing.T) {
	spec := shell("exit 0")
	spec.Stdin = strings.Repeat("x", 1<<20)
	if result := run(t, opened(t), spec); result.ExitCode != 0 {
		t.Errorf("%+v", result)
	}
}

func TestTimeoutThatEndsBeforeTheStartEndsTheCommand(t *testing.T) {
	table := opened(t)
	for _, taken := range []int{0, quickStarts} {
		for range taken {
			table.quick <- struct{}{}
		}
		spec := shell("sleep 60")
		spec.Timeout = time.Nanosecond
		if result := run(t, table, spec); !result.TimedOut || result.Signal != int(syscall.SIGKILL) {
			t.Errorf("%+v", result)
		}
	}
}
