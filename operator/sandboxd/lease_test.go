package main

import (
	"fmt"
	"strings"
	"testing"
	"time"
)

func TestNoteIsTheOwnersAndStaysWithTheLease(t *testing.T) {
	w := newWorld(t)
	take := func(note string) (int, map[string]any) {
		return w.call(t, "POST", "/lease", "admin", fmt.Sprintf(`{"owner":"o","attempt":3,"token":"lease","ttlSeconds":600,"note":%q}`, note))
	}
	shown := func() map[string]any {
		_, value := w.call(t, "GET", "/lease", "admin", "")
		return value
	}
	if value := shown(); value["state"] != "free" || value["owner"] != nil || value["note"] != "" || value["expiresInSeconds"] != nil {
		t.Error(value)
	}
	take("first")
	take("") // a heartbeat
	want := map[string]any{"state": "leased", "owner": "o", "attempt": 3.0, "note": "first", "incarnation": 4.0, "expiresInSeconds": 600.0}
	for name, value := range shown() {
		if value != want[name] {
			t.Errorf("%s: %v, want %v", name, value, want[name])
		}
	}
	take("second")
	if value := shown(); value["note"] != "second" {
		t.Error(value)
	}
	if _, value := w.call(t, "GET", "/healthz", "", ""); strings.Contains(fmt.Sprint(value), "second") {
		t.Error("anybody can read the note: ", value)
	}
	if status, value := take(strings.Repeat("\"", maxNoteBytes+1)); status != 400 || !strings.Contains(fmt.Sprint(value), "note: has 8193 bytes") {
		t.Error(status, value)
	}
	if status, value := take(strings.Repeat("\"", maxNoteBytes)); status != 200 {
		t.Error(status, value)
	}
	w.clock = w.clock.Add(601 * time.Second)
	if value := shown(); value["state"] != "dirty" || value["note"] != "" || value["owner"] != nil {
		t.Error(value)
	}
	w.call(t, "POST", "/reset", "admin", "{}")
	if value := shown(); value["state"] != "free" || value["note"] != "" || value["incarnation"] != 5.0 {
		t.Error(value)
	}
}

func TestCleanResetNamesTheNextIncarnation(t *testing.T) {
	w := newWorld(t)
	if _, value := w.call(t, "POST", "/reset", "admin", "{}"); value["incarnation"] != 5.0 {
		t.Error(value)
	}
	w.residue = fmt.Errorf("something")
	if _, value := w.call(t, "POST", "/reset", "admin", "{}"); value["incarnation"] != nil {
		t.Error(value)
	}
}
