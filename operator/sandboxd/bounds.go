package main

import (
	"context"
	"io"
	"net"
	"net/http"
	"slices"
	"sync"
	"time"
)

// budget shares out memory in units, first come first served.
type budget struct {
	turn  chan struct{} // held by who takes units: two that wait for each other's would wait for ever
	units chan struct{}
}

func newBudget(units int) *budget {
	return &budget{turn: make(chan struct{}, 1), units: make(chan struct{}, units)}
}

// take waits for n units, for a while.
func (b *budget) take(ctx context.Context, n int, wait time.Duration) bool {
	ctx, cancel := context.WithTimeout(ctx, wait)
	defer cancel()
	select {
	case b.turn <- struct{}{}:
	case <-ctx.Done():
		return false
	}
	defer func() { <-b.turn }()
	for taken := range n {
		select {
		case b.units <- struct{}{}:
		case <-ctx.Done():
			b.give(taken)
			return false
		}
	}
	return true
}

func (b *budget) give(n int) {
	for range n {
		<-b.units
	}
}

// connections bounds their number. Whoever comes when all are taken gets the place of the one that has
// been without an authorized request for longest: a stranger cannot lock the owner out.
type connections struct {
	limit int

	mu   sync.Mutex
	idle []*connection // oldest first
	busy int
}

type connection struct {
	net.Conn
	all *connections
}

// counted is a listener whose connections count.
type counted struct {
	net.Listener
	all *connections
}

type connectionKey struct{}

func (l counted) Accept() (net.Conn, error) {
	conn, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	made := &connection{conn, l.all}
	for _, out := range l.all.admit(made) {
		out.Conn.Close()
	}
	return made, nil
}

// admit counts a new one and returns the ones that must go for it, itself perhaps.
func (c *connections) admit(made *connection) (out []*connection) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.idle = append(c.idle, made)
	if over := len(c.idle) + c.busy - c.limit; over > 0 {
		out = slices.Clone(c.idle[:min(over, len(c.idle))])
		c.idle = slices.Delete(c.idle, 0, len(out))
	}
	return out
}

// ReadFrom lets the kernel copy a file to the socket.
func (c *connection) ReadFrom(from io.Reader) (int64, error) { return io.Copy(c.Conn, from) }

// Close also gives the place back.
func (c *connection) Close() error {
	c.all.mu.Lock()
	if at := slices.Index(c.all.idle, c); at >= 0 {
		c.all.idle = slices.Delete(c.all.idle, at, at+1)
	}
	c.all.mu.Unlock()
	return c.Conn.Close()
}

// serving keeps the connection of an authorized request from being closed for another.
func (c *connections) serving(r *http.Request) (done func()) {
	made, _ := r.Context().Value(connectionKey{}).(*connection)
	if made == nil {
		return func() {}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	at := slices.Index(c.idle, made)
	if at < 0 {
		return func() {} // it is being closed
	}
	c.idle = slices.Delete(c.idle, at, at+1)
	c.busy++
	return func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		c.busy--
		c.idle = append(c.idle, made)
	}
}
