package main

import (
	"bytes"
	"context"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"agentfly.dev/sandboxd/proc"
)

// gated makes every command write its text, wait for the gate or its kill, and then end. It counts starts.
func (w *world) gated(text string) (gate chan struct{}, started *atomic.Int64) {
	gate, started = make(chan struct{}), &atomic.Int64{}
	w.run = func(ctx context.Context, spec proc.Spec) (proc.Result, error) {
		started.Add(1)
		_, _ = spec.Stdout.Write([]byte(text))
		select {
		case <-gate:
			return proc.Result{ExitCode: 7}, ctx.Err()
		case <-ctx.Done():
			return proc.Result{ExitCode: 137, Signal: 9}, ctx.Err()
		}
	}
	return gate, started
}

func eventually(t *testing.T, what string, holds func() bool) {
	t.Helper()
	for range 500 {
		if holds() {
			return
		}
		time.Sleep(10 * time.Millisecond)
	}
	t.Fatal("never: ", what)
}

const long = `{"command":"x","waitSeconds":0}`

// Long commands.

func TestLongCommandAnswersAtOnceAndIsAskedForLater(t *testing.T) {
	w := newWorld(t)
	gate, _ := w.gated("so far")
	w.lease(t)
	_, begun := w.call(t, "POST", "/exec", "lease", `{"command":"x","waitSeconds":0.05}`)
	id, _ := begun["id"].(string)
	if id == "" || begun["running"] != true || begun["stdout"] != "so far" || begun["stdoutOffset"] != 6.0 {
		t.Fatal(begun)
	}
	if _, value := w.call(t, "GET", "/exec/"+id+"?wait=0", "lease", ""); value["running"] != true {
		t.Error(value)
	}
	close(gate)
	_, value := w.call(t, "GET", "/exec/"+id+"?wait=10", "lease", "")
	if value["running"] != false || value["exitCode"] != 7.0 || value["stdout"] != "so far" {
		t.Error(value)
	}
}

func TestCommandThatEndsInTimeIsAnsweredWhole(t *testing.T) {
	w := newWorld(t)
	w.lease(t)
	if _, value := w.call(t, "POST", "/exec", "lease", `{"command":"x","waitSeconds":10}`); value["running"] != false || value["exitCode"] != 0.0 {
		t.Error(value)
	}
}

func TestOutputIsReadInOrderWithoutLoss(t *testing.T) {
	w := newWorld(t)
	pieces := make(chan string)
	w.run = func(_ context.Context, spec proc.Spec) (proc.Result, error) {
		for piece := range pieces {
			_, _ = spec.Stdout.Write([]byte(piece))
		}
		return proc.Result{}, nil
	}
	w.lease(t)
	_, value := w.call(t, "POST", "/exec", "lease", long)
	id, text, offset := value["id"].(string), "", 0.0
	ask := func() {
		_, value = w.call(t, "GET", fmt.Sprintf("/exec/%s?wait=10&stdout=%.0f", id, offset), "lease", "")
		text += value["stdout"].(string)
		offset = value["stdoutOffset"].(float64)
	}
	for _, piece := range []string{"one ", "tw\xc3", "\xb6 ", "three"} { // a character in two parts
		pieces <- piece
		if piece != "tw\xc3" {
			ask()
		}
	}
	close(pieces)
	for value["running"] == true {
		ask()
	}
	if text != "one twö three" {
		t.Errorf("%q", text)
	}
	if _, whole := w.call(t, "GET", "/exec/"+id, "lease", ""); whole["stdout"] != text {
		t.Error(whole)
	}
	status, value := w.call(t, "GET", "/exec/"+id+"?stdout=99", "lease", "")
	if status != 400 || !strings.Contains(fmt.Sprint(value), "stdout: offset 99") {
		t.Error(status, value)
	}
}

func TestWaitForOutputIsNotEndedByHalfACharacter(t *testing.T) {
	w := newWorld(t)
	w.gated("\xc3")
	w.lease(t)
	_, value := w.call(t, "POST", "/exec", "lease", long)
	began := time.Now()
	_, value = w.call(t, "GET", "/exec/"+value["id"].(string)+"?wait=0.2&stdout=0&stderr=0", "lease", "")
	if value["stdout"] != "" || time.Since(began) < 150*time.Millisecond {
		t.Error(value, time.Since(began))
	}
}

func TestCancelKillsTellsHowItEndedAndForgets(t *testing.T) {
	w := newWorld(t)
	w.gated("text")
	w.lease(t)
	_, value := w.call(t, "POST", "/exec", "lease", long)
	path := "/exec/" + value["id"].(string)
	if _, value := w.call(t, "DELETE", path, "lease", ""); value["running"] != false || value["signal"] != 9.0 || value["stdout"] != "text" {
		t.Error(value)
	}
	for _, method := range []string{"GET", "DELETE"} {
		if status, value := w.call(t, method, path, "lease", ""); status != 404 || code(value) != "NotFound" {
			t.Error(method, status, value)
		}
	}
}

func TestLongCommandOutlivesItsClientButNotItsLease(t *testing.T) {
	w := newWorld(t)
	_, started := w.gated("")
	w.lease(t)
	_, value := w.call(t, "POST", "/exec", "lease", long)
	path := "/exec/" + value["id"].(string)
	w.http.CloseClientConnections()
	time.Sleep(50 * time.Millisecond)
	if _, value := w.call(t, "GET", path, "lease", ""); value["running"] != true || started.Load() != 1 {
		t.Fatal(value)
	}
	polled := make(chan string)
	go func() {
		_, value := w.call(t, "GET", path+"?wait=30", "lease", "")
		polled <- code(value)
	}()
	time.Sleep(50 * time.Millisecond)
	w.call(t, "POST", "/reset", "admin", "{}")
	if got := <-polled; got != "LeaseLost" {
		t.Error(got)
	}
	w.lease(t)
	if status, _ := w.call(t, "GET", path, "lease", ""); status != 404 {
		t.Error("the next lease sees it:", status)
	}
}

func TestFinishedCommandsAreForgottenAboveTheBounds(t *testing.T) {
	w := newWorld(t)
	w.run = func(_ context.Context, spec proc.Spec) (proc.Result, error) {
		_, _ = spec.Stdout.Write(bytes.Repeat([]byte("y"), maxOutputBytes))
		return proc.Result{}, nil
	}
	w.lease(t)
	body := fmt.Sprintf(`{"command":"x","waitSeconds":10,"outputLimitBytes":%d}`, maxOutputBytes)
	var ids []string
	for range maxFinishedBytes/maxOutputBytes + 1 {
		_, value := w.call(t, "POST", "/exec", "lease", body)
		ids = append(ids, value["id"].(string))
	}
	if status, _ := w.call(t, "GET", "/exec/"+ids[0], "lease", ""); status != 404 {
		t.Error("the oldest is still there:", status)
	}
	if status, _ := w.call(t, "GET", "/exec/"+ids[1], "lease", ""); status != 200 {
		t.Error("the second is gone:", status)
	}
	w.run = func(context.Context, proc.Spec) (proc.Result, error) { return proc.Result{}, nil }
	for range maxFinished {
		w.call(t, "POST", "/exec", "lease", body)
	}
	if status, _ := w.call(t, "GET", "/exec/"+ids[len(ids)-1], "lease", ""); status != 404 {
		t.Error("more than the bound are remembered:", status)
	}
	if held := w.server.held.jobs; len(held.byID) != maxFinished || len(held.finished) != maxFinished || held.bytes != 0 {
		t.Error(len(held.byID), len(held.finished), held.bytes)
	}
}

func TestBadWaitsAndOffsetsAreNamed(t *testing.T) {
	w := newWorld(t)
	w.gated("")
	w.lease(t)
	_, value := w.call(t, "POST", "/exec", "lease", long)
	path := "/exec/" + value["id"].(string)
	for query, words := range map[string]string{"?wait=-1": "wait", "?wait=31": "waitSeconds", "?wait=x": "wait",
		"?wait=NaN": "wait", "?stdout=-1": "stdout", "?stderr=x": "stderr"} {
		if status, value := w.call(t, "GET", path+query, "lease", ""); status != 400 || !strings.Contains(fmt.Sprint(value), words) {
			t.Error(query, status, value)
		}
	}
	for _, wait := range []string{"31", "-1", "1e300"} { // the last one is more than a duration can be
		body := `{"command":"x","timeoutSeconds":1,"waitSeconds":` + wait + `}`
		if status, value := w.call(t, "POST", "/exec", "lease", body); status != 400 || !strings.Contains(fmt.Sprint(value), "waitSeconds") {
			t.Error(wait, status, value)
		}
	}
}

// Idempotency keys.

func TestSameKeyReplaysAndRunsOnce(t *testing.T) {
	w := newWorld(t)
	gate, started := w.gated("once")
	w.lease(t)
	var callers sync.WaitGroup
	for range 4 { // while it runs, they wait for it
		callers.Add(1)
		go func() {
			defer callers.Done()
			if _, value := w.keyed(t, "k", "POST", "/exec", "lease", `{"command":"x"}`); value["exitCode"] != 7.0 || value["stdout"] != "once" {
				t.Error(value)
			}
		}()
	}
	eventually(t, "started", func() bool { return started.Load() == 1 })
	time.Sleep(50 * time.Millisecond)
	close(gate)
	callers.Wait()
	if _, value := w.keyed(t, "k", "POST", "/exec", "lease", `{"command":"x"}`); value["exitCode"] != 7.0 || started.Load() != 1 {
		t.Error(value, started.Load())
	}
	_, first := w.keyed(t, "long", "POST", "/exec", "lease", long)
	if _, again := w.keyed(t, "long", "POST", "/exec", "lease", long); again["id"] != first["id"] || started.Load() != 2 {
		t.Error(first, again)
	}
}

func TestKeyWithAnotherBodyIsRefusedByName(t *testing.T) {
	w := newWorld(t)
	w.lease(t)
	w.keyed(t, "k", "POST", "/exec", "lease", `{"command":"x"}`)
	for method, path := range map[string]string{"POST": "/exec", "PUT": "/files?path=/tmp/never-written"} {
		status, value := w.keyed(t, "k", method, path, "lease", `{"command":"y"}`)
		if status != 422 || code(value) != "KeyReused" || !strings.Contains(fmt.Sprint(value), `"k"`) {
			t.Error(method, status, value)
		}
	}
	if status, value := w.keyed(t, strings.Repeat("k", maxKeyBytes+1), "POST", "/exec", "lease", `{"command":"x"}`); status != 400 || !strings.Contains(fmt.Sprint(value), "Idempotency-Key") {
		t.Error(status, value)
	}
}

func TestRefusedRequestUsesUpNoKey(t *testing.T) {
	w := newWorld(t)
	w.lease(t)
	if status, _ := w.keyed(t, "k", "POST", "/exec", "lease", `{}`); status != 400 {
		t.Error(status)
	}
	if status, value := w.keyed(t, "k", "POST", "/exec", "lease", `{"command":"x"}`); status != 200 {
		t.Error(status, value)
	}
	if w.server.running != 0 || len(w.server.bodies.units) != 0 {
		t.Error("a refused request holds", w.server.running, len(w.server.bodies.units))
	}
}

func TestAnswerThatIsNoLongerKeptIsNotRunAgain(t *testing.T) {
	w := newWorld(t)
	_, started := w.gated("")
	w.run = func(context.Context, proc.Spec) (proc.Result, error) { started.Add(1); return proc.Result{}, nil }
	w.lease(t)
	for at := range maxFinished + 1 {
		w.keyed(t, fmt.Sprint(at), "POST", "/exec", "lease", `{"command":"x"}`)
	}
	if status, value := w.keyed(t, "0", "POST", "/exec", "lease", `{"command":"x"}`); status != 409 || code(value) != "Forgotten" {
		t.Error(status, value)
	}
	if started.Load() != maxFinished+1 {
		t.Error(started.Load())
	}
	for at := range maxKeys + 1 {
		w.server.held.jobs.claim(fmt.Sprint("more", at), digest{}, nil, true)
	}
	if held := w.server.held.jobs; len(held.byKey) != maxKeys || len(held.keys) != maxKeys {
		t.Error(len(held.byKey), len(held.keys))
	}
}

func TestKeysEndWithTheirLease(t *testing.T) {
	w := newWorld(t)
	w.lease(t)
	w.keyed(t, "k", "POST", "/exec", "lease", `{"command":"x"}`)
	w.call(t, "POST", "/reset", "admin", "{}")
	if left := w.server.held.jobs; len(left.byKey)+len(left.finished) != 0 {
		t.Error("answers are kept without a lease:", len(left.byKey), len(left.finished))
	}
	w.lease(t)
	if status, value := w.keyed(t, "k", "POST", "/exec", "lease", `{"command":"y"}`); status != 200 {
		t.Error(status, value)
	}
}

// gone starts a request and breaks its connection once the command runs.
func (w *world) gone(t *testing.T, key, body string, started *atomic.Int64) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	request, _ := http.NewRequestWithContext(ctx, "POST", w.http.URL+"/exec", strings.NewReader(body))
	request.Header.Set("Authorization", "Bearer lease")
	request.Header.Set("Idempotency-Key", key)
	before := started.Load()
	go func() {
		if answer, err := http.DefaultClient.Do(request); err == nil {
			answer.Body.Close()
		}
	}()
	eventually(t, "started", func() bool { return started.Load() == before+1 })
}

func TestClientThatLostItsConnectionComesBackToTheSameCommand(t *testing.T) {
	w := newWorld(t)
	gate, started := w.gated("kept")
	w.lease(t)
	w.gone(t, "k", `{"command":"x"}`, started)
	time.AfterFunc(comeBack+500*time.Millisecond, func() { close(gate) })
	if _, value := w.keyed(t, "k", "POST", "/exec", "lease", `{"command":"x"}`); value["exitCode"] != 7.0 || started.Load() != 1 {
		t.Error(value, started.Load())
	}
}

func TestCommandOfAClientThatStaysAwayIsKilled(t *testing.T) {
	w := newWorld(t)
	_, started := w.gated("")
	w.lease(t)
	running := func() int { w.server.mu.Lock(); defer w.server.mu.Unlock(); return w.server.running }
	w.gone(t, "", `{"command":"x"}`, started)
	eventually(t, "killed at once", func() bool { return running() == 0 })
	w.gone(t, "k", `{"command":"x"}`, started)
	w.gone(t, "never told its id", `{"command":"x","waitSeconds":30}`, started)
	eventually(t, "killed after a while", func() bool { return running() == 0 })
	for key, body := range map[string]string{"k": `{"command":"x"}`, "never told its id": `{"command":"x","waitSeconds":30}`} {
		if status, value := w.keyed(t, key, "POST", "/exec", "lease", body); status != 409 || code(value) != "Cancelled" || started.Load() != 3 {
			t.Error(key, status, value, started.Load())
		}
	}
}

// Memory.

func TestSlotIsTakenBeforeTheBody(t *testing.T) {
	w := newWorld(t)
	gate, started := w.gated("")
	defer close(gate)
	w.lease(t)
	for range maxCommands {
		w.call(t, "POST", "/exec", "lease", long)
	}
	eventually(t, "all run", func() bool { return started.Load() == maxCommands })
	if status, value := w.call(t, "POST", "/exec", "lease", `this is not even JSON`); status != 409 || code(value) != "Busy" {
		t.Error(status, value)
	}
}

func TestLargeBodiesWaitForEachOther(t *testing.T) {
	w := newWorld(t)
	var at, most atomic.Int64
	w.run = func(_ context.Context, spec proc.Spec) (proc.Result, error) {
		now := at.Add(int64(len(spec.Stdin)))
		for seen := most.Load(); now > seen && !most.CompareAndSwap(seen, now); seen = most.Load() {
		}
		time.Sleep(20 * time.Millisecond)
		at.Add(-int64(len(spec.Stdin)))
		return proc.Result{}, nil
	}
	w.lease(t)
	w.server.bodies = newBudget(4)
	body := `{"command":"x","stdin":"` + strings.Repeat("y", 3*bodyUnitBytes/2) + `"}`
	var callers sync.WaitGroup
	for range 8 {
		callers.Add(1)
		go func() {
			defer callers.Done()
			if status, value := w.call(t, "POST", "/exec", "lease", body); status != 200 {
				t.Error(status, value)
			}
		}()
	}
	callers.Wait()
	if most.Load() > 4*bodyUnitBytes || len(w.server.bodies.units) != 0 {
		t.Error(most.Load(), len(w.server.bodies.units))
	}
}

func TestJobIsNotSeenToEndBeforeItCanBeForgotten(t *testing.T) {
	j := newJobs("1")
	one := newJob(context.Background(), "", proc.Spec{Stdout: proc.NewOutput(1), Stderr: proc.NewOutput(1)})
	j.name(one)
	j.mu.Lock() // who is about to count it among the finished waits here
	go j.end(one)
	select {
	case <-one.ended:
		t.Error("its end was told, and forget would do nothing")
	case <-time.After(20 * time.Millisecond):
	}
	j.mu.Unlock()
	<-one.ended
	j.forget(one)
	if _, err := j.find(one.id); err == nil || len(j.finished) != 0 {
		t.Error("it was forgotten, and is still there:", err)
	}
}
