package main

import (
	"context"
	"fmt"
	"strings"
	"testing"

	"agentfly.dev/sandboxd/proc"
)

// send writes a request and reads no answer.
func send(t *testing.T, address, text string) {
	t.Helper()
	if _, err := fmt.Fprintf(dial(t, address), "%s", text); err != nil {
		t.Fatal(err)
	}
}

func TestReaderThatStallsKeepsNoPlaceFromTheNextLease(t *testing.T) {
	w, address := crowd(t, maxConnections)
	w.run = func(_ context.Context, spec proc.Spec) (proc.Result, error) {
		flood := []byte(strings.Repeat("\x00", maxOutputBytes)) // six times as long in JSON
		_, _ = spec.Stdout.Write(flood)
		_, _ = spec.Stderr.Write(flood)
		return proc.Result{}, nil
	}
	w.lease(t)
	_, value := w.call(t, "POST", "/exec", "lease", `{"command":"x","waitSeconds":10,"outputLimitBytes":1048576}`)
	const stalled = 2 * maxLargeAnswers
	for range stalled {
		send(t, address, "GET /exec/"+value["id"].(string)+" HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer lease\r\n\r\n")
	}
	eventually(t, "all are answered", func() bool { return w.server.holders.Load() == stalled })
	eventually(t, "some are written", func() bool { return len(w.server.answers.units) == maxLargeAnswers })
	if status, _ := w.call(t, "GET", "/exec/"+value["id"].(string)+"?stdout=1048576&stderr=1048576", "lease", ""); status != 200 {
		t.Error("a small answer had to wait:", status)
	}
	if status, value := w.call(t, "POST", "/reset", "admin", ""); status != 200 {
		t.Fatal(status, value)
	}
	eventually(t, "their places are free", func() bool { return w.server.holders.Load() == 0 })
	if taken := len(w.server.answers.units); taken != 0 {
		t.Error("memory of answers was not given back:", taken)
	}
}

func TestBodyThatStallsKeepsNoSlotFromTheNextLease(t *testing.T) {
	w, address := crowd(t, maxConnections)
	w.lease(t)
	for range maxCommands {
		send(t, address, "POST /exec HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer lease\r\nContent-Length: 20\r\n\r\n{")
	}
	taken := func() int {
		w.server.mu.Lock()
		defer w.server.mu.Unlock()
		return w.server.running
	}
	eventually(t, "all slots are taken", func() bool { return taken() == maxCommands })
	if status, value := w.call(t, "POST", "/reset", "admin", ""); status != 200 {
		t.Fatal(status, value)
	}
	eventually(t, "the slots are free", func() bool { return taken() == 0 })
}
