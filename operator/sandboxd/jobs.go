package main

import (
	"context"
	"crypto/sha256"
	"fmt"
	"net/http"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"agentfly.dev/sandboxd/proc"
)

type digest = [sha256.Size]byte

// job is one command, from its request to the moment when its answer is forgotten.
type job struct {
	id             string // "" unless it goes on without its client
	stdout, stderr *proc.Output
	ctx            context.Context // ends with the lease
	cancel         context.CancelFunc
	dismissed      atomic.Bool   // it was asked to be cancelled
	ended          chan struct{} // closed once what follows is set
	result         proc.Result
	oom            bool
	err            error

	key      string // "" for none
	waiters  int    // requests that wait for it; guarded by the jobs that it is one of, as is
	detached bool   // somebody was told its id
}

// upload is one file that was sent under a key.
type upload struct {
	ended   chan struct{} // closed once what follows is set
	content digest
	written int64
	failed  bool // then the key is free again
}

// keyed is what was done under an Idempotency-Key: a *job, an *upload, or nil once its answer is forgotten.
type keyed struct {
	request digest
	done    any
}

// jobs are the commands of one lease, and what its keys stand for. They end with it.
type jobs struct {
	prefix string

	mu       sync.Mutex // guards what follows
	started  int
	byID     map[string]*job
	byKey    map[string]*keyed
	keys     []string // of byKey, oldest first
	finished []*job   // kept for who asks later, oldest first
	bytes    int      // of their output
}

func newJobs(prefix string) *jobs {
	return &jobs{prefix: prefix, byID: map[string]*job{}, byKey: map[string]*keyed{}}
}

// newJob makes one whose context is a child of the lease's. Nothing knows it yet.
func newJob(lease context.Context, key string, spec proc.Spec) *job {
	ctx, cancel := context.WithCancel(lease)
	return &job{stdout: spec.Stdout, stderr: spec.Stderr, ctx: ctx, cancel: cancel, ended: make(chan struct{}), key: key}
}

// knows says whether a request under this key has been here.
func (j *jobs) knows(key string) bool {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.byKey[key] != nil
}

// claim puts what a request is about to do under its key, or returns what was done under it before. A key
// that was known when the request began may not be taken as a fresh one.
func (j *jobs) claim(key string, request digest, done any, fresh bool) (before any, err error) {
	if key == "" {
		return nil, nil
	}
	j.mu.Lock()
	defer j.mu.Unlock()
	known := j.byKey[key]
	switch {
	case known == nil && fresh:
	case known == nil || known.done == nil:
		return nil, apiError{http.StatusConflict, "Forgotten",
			"Idempotency-Key: " + strconv.Quote(key) + " was used, and its answer is no longer kept"}
	case known.request != request:
		return nil, keyReused(key)
	default:
		return known.done, nil
	}
	if len(j.keys) == maxKeys {
		delete(j.byKey, j.keys[0])
		j.keys = slices.Delete(j.keys, 0, 1)
	}
	j.byKey[key] = &keyed{request, done}
	j.keys = append(j.keys, key)
	return nil, nil
}

func keyReused(key string) error {
	return apiError{http.StatusUnprocessableEntity, "KeyReused",
		"Idempotency-Key: " + strconv.Quote(key) + " was used for another request; take a new key for each"}
}

// idempotencyKey is "" for a request without one.
func idempotencyKey(r *http.Request) (string, error) {
	key := r.Header.Get("Idempotency-Key")
	if len(key) > maxKeyBytes {
		return "", badRequest("Idempotency-Key: has " + strconv.Itoa(len(key)) + " bytes, more than " + strconv.Itoa(maxKeyBytes))
	}
	return key, nil
}

// release frees a key whose request came to nothing.
func (j *jobs) release(key string) {
	j.mu.Lock()
	defer j.mu.Unlock()
	if at := slices.Index(j.keys, key); at >= 0 {
		j.keys = slices.Delete(j.keys, at, at+1)
		delete(j.byKey, key)
	}
}

// detach lets a job go on without its client, which is told its id.
func (j *jobs) detach(one *job) {
	j.mu.Lock()
	defer j.mu.Unlock()
	one.detached = true
}

// name gives a job an id to be asked for by.
func (j *jobs) name(one *job) {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.started++
	one.id = fmt.Sprintf("%s-%d", j.prefix, j.started)
	j.byID[one.id] = one
}

// unname is for one that is not to run after all.
func (j *jobs) unname(one *job) {
	j.mu.Lock()
	defer j.mu.Unlock()
	delete(j.byID, one.id)
}

func (j *jobs) find(id string) (*job, error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	if one := j.byID[id]; one != nil {
		return one, nil
	}
	return nil, apiError{http.StatusNotFound, "NotFound", "id: no command " + strconv.Quote(id) + " is running or remembered"}
}

// end makes the result of a job known, and forgets the oldest results above the bounds.
func (j *jobs) end(one *job) {
	j.mu.Lock() // first: who sees the end may forget the job, which must be among the finished by then
	defer j.mu.Unlock()
	close(one.ended)
	one.cancel()
	if one.id == "" && one.key == "" {
		return
	}
	j.finished = append(j.finished, one)
	j.bytes += one.size()
	for len(j.finished) > maxFinished || j.bytes > maxFinishedBytes {
		j.drop(j.finished[0])
	}
}

// forget drops a finished job.
func (j *jobs) forget(one *job) {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.drop(one)
}

func (j *jobs) drop(one *job) {
	at := slices.Index(j.finished, one)
	if at < 0 {
		return
	}
	j.finished = slices.Delete(j.finished, at, at+1)
	j.bytes -= one.size()
	delete(j.byID, one.id)
	if known := j.byKey[one.key]; known != nil && known.done == any(one) {
		known.done = nil
	}
}

func (o *job) size() int {
	stdout, _ := o.stdout.Kept()
	stderr, _ := o.stderr.Kept()
	return len(stdout) + len(stderr)
}

// join counts a request that waits for a job.
func (j *jobs) join(one *job) {
	j.mu.Lock()
	defer j.mu.Unlock()
	one.waiters++
}

// leave is the end of a join. A job that nobody waits for any more, and of which nobody was told the id, is
// killed: at once, or where a key lets its client come back, a moment later.
func (j *jobs) leave(one *job) {
	j.mu.Lock()
	defer j.mu.Unlock()
	if one.waiters--; one.waiters > 0 || one.detached {
		return
	}
	select {
	case <-one.ended:
		return
	default:
	}
	if one.key == "" {
		one.cancel()
		return
	}
	time.AfterFunc(comeBack, func() {
		j.mu.Lock()
		defer j.mu.Unlock()
		if one.waiters == 0 && !one.detached {
			one.cancel()
		}
	})
}
