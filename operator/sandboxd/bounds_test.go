package main

import (
	"context"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"
)

func TestBudgetIsSharedOutInTurn(t *testing.T) {
	b, background := newBudget(3), context.Background()
	if !b.take(background, 2, time.Second) || b.take(background, 2, 10*time.Millisecond) || len(b.units) != 2 {
		t.Fatal("more than there is was given:", len(b.units))
	}
	got := make(chan bool)
	go func() { got <- b.take(background, 3, 5*time.Second) }()
	time.Sleep(20 * time.Millisecond)
	b.give(2)
	if !<-got || len(b.units) != 3 {
		t.Error("what was given back did not arrive")
	}
	gone, cancel := context.WithCancel(background)
	cancel()
	if b.take(gone, 1, time.Minute) {
		t.Error("somebody who has gone was given some")
	}
}

// crowd is a real server that may have n connections.
func crowd(t *testing.T, n int) (w *world, address string) {
	t.Helper()
	w = newWorld(t)
	w.server.connections.limit = n
	listening, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { listening.Close() })
	go w.server.serve(listening)
	return w, listening.Addr().String()
}

func dial(t *testing.T, address string) net.Conn {
	t.Helper()
	conn, err := net.Dial("tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	return conn
}

func closed(conn net.Conn, wait time.Duration) bool {
	_ = conn.SetReadDeadline(time.Now().Add(wait))
	_, err := conn.Read(make([]byte, 1))
	timeout, ok := err.(net.Error)
	return err != nil && !(ok && timeout.Timeout())
}

func TestStrangersCannotLockTheOwnerOut(t *testing.T) {
	w, address := crowd(t, 4)
	gate, started := w.gated("")
	w.lease(t)
	owner := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}, Timeout: 10 * time.Second}
	call := func(path, token, body string) int {
		request, _ := http.NewRequest("POST", "http://"+address+path, http.NoBody)
		if body != "" {
			request, _ = http.NewRequest("POST", "http://"+address+path, strings.NewReader(body))
		}
		request.Header.Set("Authorization", "Bearer "+token)
		answer, err := owner.Do(request)
		if err != nil {
			t.Error(err)
			return 0
		}
		answer.Body.Close()
		return answer.StatusCode
	}
	running := make(chan int)
	go func() { running <- call("/exec", "lease", `{"command":"x"}`) }()
	eventually(t, "it runs", func() bool { return started.Load() == 1 })
	var strangers []net.Conn
	for range 8 {
		strangers = append(strangers, dial(t, address))
	}
	for _, early := range strangers[:4] {
		if !closed(early, 5*time.Second) {
			t.Error("the oldest of too many is still there")
		}
	}
	close(gate)
	if status := <-running; status != 200 {
		t.Error("an authorized request was cut off:", status)
	}
	if status := call("/reset", "admin", ""); status != 200 {
		t.Error(status)
	}
	if closed(strangers[7], 50*time.Millisecond) {
		t.Error("one that has its place was closed")
	}
	eventually(t, "everything is counted", func() bool {
		w.server.connections.mu.Lock()
		defer w.server.connections.mu.Unlock()
		return w.server.connections.busy == 0 && len(w.server.connections.idle) <= 4
	})
}

func TestHoldersRequestsLeaveRoomForTheOwner(t *testing.T) {
	w := newWorld(t)
	gate, _ := w.gated("")
	w.lease(t)
	_, value := w.call(t, "POST", "/exec", "lease", long)
	path := "/exec/" + value["id"].(string)
	answers := make(chan int, maxHolders)
	for range maxHolders {
		go func() { status, _ := w.call(t, "GET", path+"?wait=30", "lease", ""); answers <- status }()
	}
	eventually(t, "all wait", func() bool { return w.server.holders.Load() == maxHolders })
	if status, value := w.call(t, "GET", path, "lease", ""); status != 409 || code(value) != "Busy" {
		t.Error(status, value)
	}
	if status, _ := w.call(t, "POST", "/lease", "admin", `{"owner":"o","attempt":0,"token":"lease","ttlSeconds":600}`); status != 200 {
		t.Error("the owner's heartbeat was refused:", status)
	}
	close(gate)
	for range maxHolders {
		if status := <-answers; status != 200 {
			t.Error(status)
		}
	}
	if left := w.server.holders.Load(); left != 0 {
		t.Error(left)
	}
}
