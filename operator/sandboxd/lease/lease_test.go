package lease

import (
	"errors"
	"testing"
	"time"
)

var (
	t0    = time.Date(2026, 11, 30, 12, 0, 0, 0, time.UTC)
	mine  = Request{Owner: "a", Attempt: 1, Token: "t", TTL: 10 * time.Second}
	after = func(seconds int) time.Time { return t0.Add(time.Duration(seconds) * time.Second) }
)

func leased(t *testing.T) *Lease {
	t.Helper()
	l := New(1)
	if renewed, err := l.Take(t0, mine); renewed || err != nil {
		t.Fatal(renewed, err)
	}
	return l
}

// 1. One owner at a time.

func TestOnlyTheSameOwnerAttemptAndTokenRenews(t *testing.T) {
	for name, r := range map[string]Request{
		"owner":   {Owner: "b", Attempt: 1, Token: "t", TTL: time.Second},
		"attempt": {Owner: "a", Attempt: 2, Token: "t", TTL: time.Second},
		"token":   {Owner: "a", Attempt: 1, Token: "u", TTL: time.Second},
	} {
		l := leased(t)
		before := *l
		if _, err := l.Take(after(1), r); !errors.Is(err, ErrBusy) {
			t.Errorf("another %s: %v, want ErrBusy", name, err)
		}
		if *l != before {
			t.Errorf("another %s changed the lease", name)
		}
	}
	l := leased(t)
	if renewed, err := l.Take(after(9), mine); !renewed || err != nil {
		t.Fatal(renewed, err)
	}
	if view := l.See(after(18)); view.State != Leased || view.Leases != 1 || !view.Expires.Equal(after(19)) {
		t.Errorf("after a heartbeat: %+v", view)
	}
}

// 2. No heartbeat, no lease.

func TestLeaseIsLostAtItsTTL(t *testing.T) {
	l := leased(t)
	if err := l.Check(after(9), "t"); err != nil {
		t.Error(err)
	}
	if err := l.Check(after(10), "t"); !errors.Is(err, ErrLost) {
		t.Errorf("at the TTL: %v", err)
	}
	if view := l.See(after(10)); view.State != Dirty || view.Owner != "" {
		t.Errorf("after the TTL: %+v", view)
	}
	if _, err := l.Take(after(11), mine); !errors.Is(err, ErrDirty) {
		t.Errorf("dirty sandbox leased: %v", err)
	}
	if l.Expire(after(12)) {
		t.Error("expired twice")
	}
}

// 3. A token serves one lease.

func TestTokenOpensNothingAfterAReset(t *testing.T) {
	l := leased(t)
	l.Revoke()
	l.Cleaned("")
	for _, token := range []string{"t", "", "other"} {
		if err := l.Check(after(1), token); !errors.Is(err, ErrLost) {
			t.Errorf("token %q: %v", token, err)
		}
	}
	if _, err := l.Take(after(1), Request{Owner: "b", Token: "u", TTL: time.Second}); err != nil {
		t.Fatal(err)
	}
	if err := l.Check(after(1), "t"); !errors.Is(err, ErrLost) {
		t.Error("the old token opens the new lease")
	}
	if view := l.See(after(1)); view.Incarnation != 2 || view.Leases != 2 {
		t.Errorf("%+v", view)
	}
}

// 4. Free means verified.

func TestResidueIsForEver(t *testing.T) {
	l := leased(t)
	l.Revoke()
	l.Cleaned("upper: /x was written")
	l.Revoke()
	l.Cleaned("")
	l.Cleaned("another")
	if l.Residue() != "upper: /x was written" {
		t.Errorf("residue %q", l.Residue())
	}
	if view := l.See(t0); view.State != Dirty || view.Incarnation != 1 {
		t.Errorf("%+v", view)
	}
}

func TestExpiredLeaseCanBeCleaned(t *testing.T) {
	l := leased(t)
	l.Expire(after(60))
	l.Revoke()
	l.Cleaned("")
	if view := l.See(after(60)); view.State != Free {
		t.Errorf("%+v", view)
	}
}

func TestEmptySecretEqualsNothing(t *testing.T) {
	if Same("", "") || Same("a", "") || Same("a", "b") || !Same("a", "a") {
		t.Error("comparison of secrets")
	}
}
