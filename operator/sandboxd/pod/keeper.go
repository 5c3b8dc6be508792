package pod

import (
	"encoding/json"
	"fmt"
	"net"
	"os"
	"time"
)

const (
	answerTime = 5 * time.Second // of a small answer into a socket
	killWait   = 5 * time.Second // a process in an uninterruptible call condemns
)

// World is what a keeper needs of the rest of its process.
type World interface {
	// Kill ends every process but this one, without waiting.
	Kill() error
	// Left returns nil once no process but this and one other is left.
	Left(other int, wait time.Duration) error
	// Verify compares what is left, this process too, with the start.
	Verify() error
}

// Keeper makes one sandbox after the other. They take over its listening socket, so that the address stays.
type Keeper struct {
	Order         Order
	Configuration []byte // of every sandbox, one line
	Listener      *os.File
	World         World
	Incarnation   int // of the first

	base   *base
	now    *process
	ground *ground  // that it stands on
	next   *process // which makes the next one
}

// report is the answer to a reset.
type report struct {
	Clean        bool    `json:"clean"`
	Incarnation  int     `json:"incarnation,omitempty"`
	Method       string  `json:"method"`
	Milliseconds float64 `json:"milliseconds"`
	Reason       string  `json:"reason,omitempty"`
}

// Become makes this process a keeper, for good. Call it before the first sandbox.
func Become() error { return becomeKeeper() }

// Start makes the first sandbox.
func (k *Keeper) Start() (err error) {
	if k.base, err = newBase(k.Order); err != nil {
		return err
	}
	if err := k.begin(); err != nil {
		return err
	}
	if err := k.now.await(); err != nil {
		return err
	}
	if err := k.serve(); err != nil {
		return err
	}
	k.prepare()
	return nil
}

// begin starts a sandbox on the ground that was prepared.
func (k *Keeper) begin() (err error) {
	prepared := k.next
	k.next = nil
	if k.ground, err = k.base.finish(prepared); err != nil {
		return err
	}
	k.now, err = k.base.begin(k.ground, k.Configuration, k.Listener)
	return err
}

// prepare begins the making of the next ground: nobody waits for it now. A holder who kills its maker, as one can who
// sees it, waits for another one at the reset.
func (k *Keeper) prepare() {
	k.next, _ = k.base.prepare()
}

func (k *Keeper) serve() error {
	return send(k.now.control, message{Incarnation: k.Incarnation})
}

// Run replaces sandboxes: whenever one asks for it, or has ended. It returns why no other can follow.
func (k *Keeper) Run() error {
	for {
		asker := k.wait()
		began := time.Now()
		left, failure := k.replace()
		if asker != nil {
			k.answer(asker, began, failure)
		}
		if failure != nil {
			k.now.drop()
			_ = k.World.Kill()
		}
		left.close()
		if failure != nil {
			return failure
		}
		k.prepare()
	}
}

// wait returns the connection of whoever asked for a reset; nil if the sandbox has ended by itself, or sends what
// nobody would who is well.
func (k *Keeper) wait() *os.File {
	told, with, err := receive(k.now.control, 0, 1)
	if err != nil || !told.Replace || len(with) == 0 {
		closeAll(with)
		return nil
	}
	return with[0]
}

// replace starts the next sandbox while the last one dies: neither sees the other, and the next one waits for its
// number. It returns what the last one stood on, if all is well: to free its files takes longer than all the rest.
func (k *Keeper) replace() (left *ground, err error) {
	left = k.ground
	k.now.drop()
	if err := k.World.Kill(); err != nil {
		return left, err
	}
	if err := k.begin(); err != nil {
		return left, fmt.Errorf("the next sandbox: %w", err)
	}
	if err := k.World.Left(k.now.pid, killWait); err != nil {
		return left, err
	}
	if err := k.World.Verify(); err != nil {
		return left, fmt.Errorf("keeper: %w", err)
	}
	if err := k.base.verify(); err != nil {
		return left, err
	}
	if left.bytes() > lateBytes {
		left.close() // there may be no room for both
	}
	if err := k.now.await(); err != nil {
		return left, fmt.Errorf("the next sandbox: %w", err)
	}
	k.Incarnation++
	return left, k.serve()
}

// answer tells how a reset went, on a connection that a sandbox had accepted.
func (k *Keeper) answer(on *os.File, began time.Time, failure error) {
	conn, err := net.FileConn(on)
	on.Close()
	if err != nil {
		return
	}
	defer conn.Close()
	told := report{Clean: failure == nil, Method: k.Order.Method,
		Milliseconds: float64(time.Since(began).Microseconds()) / 1000}
	if failure == nil {
		told.Incarnation = k.Incarnation
	} else {
		told.Reason = failure.Error()
	}
	body, err := json.Marshal(told)
	if err != nil {
		return
	}
	_ = conn.SetWriteDeadline(time.Now().Add(answerTime))
	_, _ = fmt.Fprintf(conn, "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n"+
		"Connection: close\r\n\r\n%s", len(body), body) // whoever asked has gone
}
