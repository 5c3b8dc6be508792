// Package lease decides who may use the sandbox. It knows neither HTTP nor processes, and the
// clock is an argument.
//
// Guarantees:
//  1. One owner at a time; the same owner, attempt and token again is a heartbeat.
//  2. Without a heartbeat within the TTL the lease is lost and the sandbox dirty: nobody may use it.
//  3. A token serves one lease: after a reset it opens nothing.
//  4. Free means verified: dirty becomes free only through a reset that found nothing, and a reset
//     that found something makes it dirty for ever.
package lease

import (
	"crypto/subtle"
	"errors"
	"fmt"
	"time"
)

// States of a sandbox.
const (
	Free   = "free"
	Leased = "leased"
	Dirty  = "dirty"
)

// Errors a caller acts upon.
var (
	ErrLost  = errors.New("lease: lost or never held with this token")
	ErrBusy  = errors.New("lease: held by another owner")
	ErrDirty = errors.New("lease: the sandbox is dirty; reset it first")
)

// Request is what an owner asks for.
type Request struct {
	Owner   string
	Attempt int
	Token   string
	TTL     time.Duration
	Note    string // the owner's, for itself; a renewal without one leaves it
}

// Lease is the state of the sandbox. The zero value is not usable; see New.
type Lease struct {
	state       string
	held        Request
	expires     time.Time
	incarnation int
	leases      int
	residue     string // why a reset failed: set once, for ever
}

// View is the state for a person or a broker to read.
type View struct {
	State       string
	Incarnation int
	Leases      int
	Owner       string
	Attempt     int
	Note        string
	Expires     time.Time
}

// New returns a free sandbox.
func New(incarnation int) *Lease { return &Lease{state: Free, incarnation: incarnation} }

// Take gives the lease or renews it, and says which (renewed).
func (l *Lease) Take(now time.Time, r Request) (renewed bool, err error) {
	l.Expire(now)
	switch l.state {
	case Dirty:
		return false, ErrDirty
	case Leased:
		if r.Owner != l.held.Owner || r.Attempt != l.held.Attempt || !Same(r.Token, l.held.Token) {
			return false, fmt.Errorf("%w (%s, attempt %d)", ErrBusy, l.held.Owner, l.held.Attempt)
		}
		renewed = true
		if r.Note == "" {
			r.Note = l.held.Note
		}
	default:
		l.leases++
	}
	l.state, l.held, l.expires = Leased, r, now.Add(r.TTL)
	return renewed, nil
}

// Check says whether the token holds the lease now.
func (l *Lease) Check(now time.Time, token string) error {
	l.Expire(now)
	if l.state != Leased || !Same(token, l.held.Token) {
		return ErrLost
	}
	return nil
}

// Expire makes a lease that was not renewed dirty, and says whether it did so in this call.
func (l *Lease) Expire(now time.Time) bool {
	if l.state != Leased || now.Before(l.expires) {
		return false
	}
	l.Revoke()
	return true
}

// Revoke takes the lease away: from here on nobody may use the sandbox.
func (l *Lease) Revoke() {
	l.state, l.held = Dirty, Request{}
}

// Cleaned ends a reset. An empty residue makes the sandbox free, under the next incarnation.
func (l *Lease) Cleaned(residue string) {
	if l.residue == "" {
		l.residue = residue
	}
	if l.residue == "" {
		l.state = Free
		l.incarnation++
	}
}

// Residue is why the sandbox is dirty for ever; empty while it is not.
func (l *Lease) Residue() string { return l.residue }

// See returns the state at a moment.
func (l *Lease) See(now time.Time) View {
	l.Expire(now)
	return View{State: l.state, Incarnation: l.incarnation, Leases: l.leases, Owner: l.held.Owner, Attempt: l.held.Attempt,
		Note: l.held.Note, Expires: l.expires}
}

// Same compares secrets in constant time. An empty secret equals nothing.
func Same(a, b string) bool {
	return a != "" && subtle.ConstantTimeCompare([]byte(a), []byte(b)) == 1
}
