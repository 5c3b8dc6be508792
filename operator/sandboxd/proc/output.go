package proc

import (
	"io"
	"os"
	"sync"
)

// output keeps the first limit bytes of a stream and drains the rest, so that a flood costs
// time but never memory, and a writer never blocks on a full pipe.
type output struct {
	mu        sync.Mutex
	limit     int
	kept      []byte
	truncated bool
	closed    bool
	done      chan struct{} // closed at end of file
}

func collect(from *os.File, limit int) *output {
	o := &output{limit: limit, done: make(chan struct{})}
	go func() {
		defer close(o.done)
		defer from.Close()
		_, _ = io.Copy(o, from)
	}()
	return o
}

// Write never fails: what is not kept is dropped.
func (o *output) Write(p []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.closed {
		return len(p), nil
	}
	if room := o.limit - len(o.kept); len(p) > room {
		o.kept, o.truncated = append(o.kept, p[:room]...), true
	} else {
		o.kept = append(o.kept, p...)
	}
	return len(p), nil
}

// take ends the keeping and hands the bytes out. Draining goes on for as long as a background
// process holds the pipe: closing it would kill that process by SIGPIPE.
func (o *output) take() ([]byte, bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	kept := o.kept
	o.closed, o.kept = true, nil
	return kept, o.truncated
}
