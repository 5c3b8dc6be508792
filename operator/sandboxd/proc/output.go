package proc

import (
	"os"
	"sync"
	"sync/atomic"
)

// Output keeps the first bytes of a stream, up to its limit, and lets the rest go, so that a flood costs time
// but never memory, and a writer never blocks on a full pipe. It may be read while it is written.
type Output struct {
	mu        sync.Mutex
	limit     int
	kept      []byte
	truncated bool
	closed    bool
	more      chan struct{} // closed at the next change; nil while nobody waits for one
}

// NewOutput returns an empty one that keeps at most limit bytes.
func NewOutput(limit int) *Output { return &Output{limit: limit} }

// Write never fails: what is not kept is dropped.
func (o *Output) Write(p []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.closed || len(p) == 0 {
		return len(p), nil
	}
	if room := o.limit - len(o.kept); len(p) > room {
		if o.truncated {
			return len(p), nil
		}
		o.kept, o.truncated = append(o.kept, p[:room]...), true
	} else {
		o.kept = append(o.kept, p...)
	}
	o.wake()
	return len(p), nil
}

// Close ends the keeping. Draining goes on for as long as a background process holds the pipe: closing
// it would kill that process by SIGPIPE.
func (o *Output) Close() {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.closed = true
	o.wake()
}

// Kept is what is kept so far, and whether more was dropped. The bytes never change.
func (o *Output) Kept() (kept []byte, truncated bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.kept, o.truncated
}

// Len is how many bytes are kept so far.
func (o *Output) Len() int {
	kept, _ := o.Kept()
	return len(kept)
}

// Beyond is closed once more than n bytes are kept, or none will follow.
func (o *Output) Beyond(n int) <-chan struct{} {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.more == nil {
		o.more = make(chan struct{})
	}
	more := o.more
	if len(o.kept) > n || o.closed {
		o.wake()
	}
	return more
}

func (o *Output) wake() {
	if o.more != nil {
		close(o.more)
		o.more = nil
	}
}

// buffers are what pipes are read into: as much as one holds by default would be more than most need.
var buffers = sync.Pool{New: func() any { return new([16 << 10]byte) }}

// drain copies both pipes of a command to their ends, which the channel tells.
func drain(stdout, stderr *os.File, spec Spec) <-chan struct{} {
	var left atomic.Int32
	drained := make(chan struct{})
	copyAll := func(from *os.File, to *Output) {
		defer from.Close()
		buffer := buffers.Get().(*[16 << 10]byte)
		defer buffers.Put(buffer)
		for {
			n, err := from.Read(buffer[:])
			_, _ = to.Write(buffer[:n])
			if err != nil {
				break
			}
		}
		if left.Add(-1) == 0 {
			close(drained)
		}
	}
	left.Store(2)
	go copyAll(stdout, spec.Stdout)
	go copyAll(stderr, spec.Stderr)
	return drained
}
