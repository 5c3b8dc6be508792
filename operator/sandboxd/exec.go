package main

import (
	"context"
	"crypto/sha256"
	"errors"
	"io"
	"net/http"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"agentfly.dev/sandboxd/lease"
	"agentfly.dev/sandboxd/proc"
)

type execReply struct {
	ExitCode        int     `json:"exitCode"`
	Signal          *int    `json:"signal"`
	Stdout          string  `json:"stdout"`
	Stderr          string  `json:"stderr"`
	StdoutTruncated bool    `json:"stdoutTruncated"`
	StderrTruncated bool    `json:"stderrTruncated"`
	TimedOut        bool    `json:"timedOut"`
	OOM             bool    `json:"oom"`
	WallSeconds     float64 `json:"wallSeconds"`
	CPUSeconds      float64 `json:"cpuSeconds"`
}

func (e execReply) outputBytes() int { return len(e.Stdout) + len(e.Stderr) }

// jobReply is what is known of a command with an id: its output from an offset on, and how it ended once it
// has. Offsets count the bytes that the command wrote.
type jobReply struct {
	execReply
	ID           string `json:"id"`
	Running      bool   `json:"running"`
	StdoutOffset int    `json:"stdoutOffset"` // where the next answer is to go on
	StderrOffset int    `json:"stderrOffset"`
}

// exec runs a command, once for each Idempotency-Key. Where the request says how long it waits, the command
// goes on under an id after that; else it is waited for, and ends when its client goes.
func (s *server) exec(w http.ResponseWriter, r *http.Request) (reply, error) {
	held, err := s.holder(bearer(r))
	if err != nil {
		return reply{}, err
	}
	key, err := idempotencyKey(r)
	if err != nil {
		return reply{}, err
	}
	one, wait, err := s.begin(w, r, held, key)
	if err != nil {
		return reply{}, err
	}
	defer held.jobs.leave(one)
	if wait == nil {
		if err := held.await(r.Context(), one, -1, nil, nil); err != nil {
			return reply{}, err
		}
		if err := held.failure(one); err != nil {
			return reply{}, err
		}
		return reply{value: render(one)}, nil
	}
	if err := held.await(r.Context(), one, *wait, nil, nil); err != nil {
		return reply{}, err
	}
	held.jobs.detach(one)
	answer, err := held.view(one, 0, 0)
	return reply{value: answer}, err
}

// begin starts the command of a request, or finds the one that its key stands for. The caller has joined it.
// The slot comes before the body: what waits for one must not wait with its body in memory.
func (s *server) begin(w http.ResponseWriter, r *http.Request, held *tenancy, key string) (_ *job, wait *time.Duration, err error) {
	fresh := !held.jobs.knows(key)
	if fresh && !s.enter() {
		return nil, nil, apiError{http.StatusConflict, "Busy", "exec: too many commands at once"}
	}
	units, ours := 0, true
	release := func() {
		s.bodies.give(units)
		if fresh {
			s.leave()
		}
	}
	defer func() {
		if ours {
			release()
		}
	}()
	if units, err = s.reserve(held, r); err != nil {
		return nil, nil, err
	}
	spec, wait, request, err := s.parse(held, w, r)
	if err != nil {
		return nil, nil, err
	}
	one := newJob(held.ctx, key, spec)
	if wait != nil {
		held.jobs.name(one)
	}
	held.jobs.join(one)
	known, err := held.jobs.claim(key, request, one, fresh)
	if known == nil && err == nil {
		ours = false
		go s.run(held, one, spec, release)
		return one, wait, nil
	}
	held.jobs.unname(one)
	one.cancel()
	if err != nil {
		return nil, nil, err
	}
	before, isJob := known.(*job)
	if !isJob {
		return nil, nil, keyReused(key)
	}
	held.jobs.join(before)
	return before, wait, nil
}

// reserve takes the memory that a large body needs, until its command has ended.
func (s *server) reserve(held *tenancy, r *http.Request) (units int, err error) {
	size := r.ContentLength
	switch {
	case size > maxExecBytes:
		return 0, &http.MaxBytesError{Limit: maxExecBytes}
	case size < 0: // it does not say
		size = maxExecBytes
	case size <= freeBodyBytes:
		return 0, nil
	}
	units = int((size + bodyUnitBytes - 1) / bodyUnitBytes)
	ctx, cancel := context.WithCancel(r.Context())
	defer cancel()
	defer context.AfterFunc(held.ctx, cancel)() // the slot is the next lease's
	if !s.bodies.take(ctx, units, bodyWait) {
		if held.ctx.Err() != nil {
			return 0, lease.ErrLost
		}
		return 0, apiError{http.StatusConflict, "Busy", "body: too many large ones at once"}
	}
	return units, nil
}

// parse reads and checks a body. What hangs on it, a slot and memory, is held until the whole of it is here, or
// the lease has ended.
func (s *server) parse(held *tenancy, w http.ResponseWriter, r *http.Request) (spec proc.Spec, wait *time.Duration, request digest, err error) {
	control := http.NewResponseController(w)
	_ = control.SetReadDeadline(time.Now().Add(bodyTime))
	stop := context.AfterFunc(held.ctx, func() { _ = control.SetReadDeadline(time.Unix(1, 0)) })
	defer func() {
		if stop() {
			_ = control.SetReadDeadline(time.Time{})
		}
	}()
	var body execRequest
	hash := sha256.New()
	err = decode(io.TeeReader(r.Body, hash), &body)
	if held.ctx.Err() != nil {
		return spec, nil, request, lease.ErrLost
	}
	if err != nil {
		return spec, nil, request, err
	}
	hash.Sum(request[:0])
	if spec, err = s.command(body); err != nil {
		return spec, nil, request, err
	}
	wait, err = waitTime(body.WaitSeconds)
	return spec, wait, request, err
}

// run is the life of one command.
func (s *server) run(held *tenancy, one *job, spec proc.Spec, release func()) {
	before := s.oomKills.read()
	one.result, one.err = s.processes.Run(one.ctx, spec)
	one.oom = s.oomKills.read() > before
	if errors.Is(one.err, proc.ErrClosed) && one.ctx.Err() != nil {
		one.err = context.Canceled // before it could start
	} else if errors.Is(one.err, context.Canceled) && one.dismissed.Load() {
		one.err = nil // as asked; how it ended is in the result
	}
	release()
	held.jobs.end(one)
}

// pollExec answers for a command with an id: at its end, or, to a request that says what output it has, as
// soon as there is more.
func (s *server) pollExec(_ http.ResponseWriter, r *http.Request) (reply, error) {
	held, one, err := s.asked(r)
	if err != nil {
		return reply{}, err
	}
	stdout, stderr, streaming, err := offsets(r)
	if err != nil {
		return reply{}, err
	}
	given, err := number(r, "wait", 0)
	if err != nil {
		return reply{}, err
	}
	wait, err := waitTime(&given)
	if err != nil {
		return reply{}, err
	}
	for deadline := time.Now().Add(*wait); ; {
		var moreOut, moreErr <-chan struct{}
		if streaming {
			moreOut, moreErr = one.stdout.Beyond(one.stdout.Len()), one.stderr.Beyond(one.stderr.Len())
		}
		answer, err := held.view(one, stdout, stderr)
		left := time.Until(deadline)
		news := streaming && (answer.Stdout != "" || answer.Stderr != "")
		if err != nil || news || !answer.Running || left <= 0 {
			return reply{value: answer}, err
		}
		if err := held.await(r.Context(), one, left, moreOut, moreErr); err != nil {
			return reply{}, err
		}
	}
}

// cancelExec kills the group of a command with an id and forgets it.
func (s *server) cancelExec(_ http.ResponseWriter, r *http.Request) (reply, error) {
	held, one, err := s.asked(r)
	if err != nil {
		return reply{}, err
	}
	stdout, stderr, _, err := offsets(r)
	if err != nil {
		return reply{}, err
	}
	one.dismissed.Store(true)
	one.cancel()
	if err := held.await(r.Context(), one, cancelWait, nil, nil); err != nil {
		return reply{}, err
	}
	answer, err := held.view(one, stdout, stderr)
	held.jobs.forget(one)
	return reply{value: answer}, err
}

func (s *server) asked(r *http.Request) (*tenancy, *job, error) {
	held, err := s.holder(bearer(r))
	if err != nil {
		return nil, nil, err
	}
	one, err := held.jobs.find(r.PathValue("id"))
	return held, one, err
}

// offsets says from where on the output is wanted, and whether the request names that at all.
func offsets(r *http.Request) (stdout, stderr int, named bool, err error) {
	query := r.URL.Query()
	out, err := number(r, "stdout", 0)
	if err != nil {
		return 0, 0, false, err
	}
	diagnostics, err := number(r, "stderr", 0)
	return int(out), int(diagnostics), query.Has("stdout") || query.Has("stderr"), err
}

func number(r *http.Request, name string, otherwise float64) (float64, error) {
	given := r.URL.Query().Get(name)
	if given == "" {
		return otherwise, nil
	}
	value, err := strconv.ParseFloat(given, 64)
	if err != nil || !(value >= 0 && value <= maxOutputBytes) {
		return 0, badRequest(name + ": " + strconv.Quote(given) + " is not a number from 0 to " + strconv.Itoa(maxOutputBytes))
	}
	return value, nil
}

func waitTime(given *float64) (*time.Duration, error) {
	if given == nil {
		return nil, nil
	}
	wait := seconds(*given)
	if !(*given >= 0 && *given <= maxWait.Seconds()) {
		return nil, badRequest("waitSeconds: not from 0 to " + strconv.Itoa(int(maxWait.Seconds())))
	}
	return &wait, nil
}

// await returns when the job has ended, when there is more of its output, after the bound (none if it is
// negative), or with an error when the client has gone or the lease has ended.
func (t *tenancy) await(client context.Context, one *job, bound time.Duration, stdout, stderr <-chan struct{}) error {
	var limit <-chan time.Time
	if bound >= 0 {
		timer := time.NewTimer(bound)
		defer timer.Stop()
		limit = timer.C
	}
	select {
	case <-one.ended:
	case <-stdout:
	case <-stderr:
	case <-limit:
	case <-t.ctx.Done():
	case <-client.Done():
	}
	if t.ctx.Err() != nil {
		return lease.ErrLost
	}
	return client.Err()
}

// failure is why an ended job has no result.
func (t *tenancy) failure(one *job) error {
	switch {
	case t.ctx.Err() != nil:
		return lease.ErrLost
	case errors.Is(one.err, context.Canceled):
		return apiError{http.StatusConflict, "Cancelled", "exec: the command was killed, because its client had gone"}
	}
	return one.err
}

// view is what there is to say about a job now.
func (t *tenancy) view(one *job, stdout, stderr int) (answer jobReply, err error) {
	answer.ID, answer.Running = one.id, true
	select {
	case <-one.ended:
		if err := t.failure(one); err != nil {
			return answer, err
		}
		answer.Running, answer.execReply = false, render(one)
	default:
	}
	answer.Stdout, answer.StdoutOffset, answer.StdoutTruncated, err = part("stdout", one.stdout, stdout, answer.Running)
	if err == nil {
		answer.Stderr, answer.StderrOffset, answer.StderrTruncated, err = part("stderr", one.stderr, stderr, answer.Running)
	}
	return answer, err
}

// part is the output from an offset on. While more may come, a character that is not whole yet is left for later.
func part(name string, output *proc.Output, from int, running bool) (string, int, bool, error) {
	kept, truncated := output.Kept()
	if from > len(kept) {
		return "", 0, false, badRequest(name + ": offset " + strconv.Itoa(from) + " is beyond the " + strconv.Itoa(len(kept)) + " bytes that there are")
	}
	piece := kept[from:]
	if running {
		piece = piece[:wholeRunes(piece)]
	}
	return text(piece), from + len(piece), truncated, nil
}

// wholeRunes is the length without a last character of which bytes are missing.
func wholeRunes(piece []byte) int {
	for back := 1; back < utf8.UTFMax && back <= len(piece); back++ {
		if tail := piece[len(piece)-back:]; utf8.RuneStart(tail[0]) {
			if !utf8.FullRune(tail) {
				return len(piece) - back
			}
			break
		}
	}
	return len(piece)
}

func (s *server) enter() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.running >= maxCommands {
		return false
	}
	s.running++
	return true
}

func (s *server) leave() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.running--
	s.lastUsed = s.now()
}

func render(one *job) execReply {
	stdout, stdoutTruncated := one.stdout.Kept()
	stderr, stderrTruncated := one.stderr.Kept()
	result := one.result
	answer := execReply{
		ExitCode: result.ExitCode, TimedOut: result.TimedOut, OOM: one.oom,
		Stdout: text(stdout), StdoutTruncated: stdoutTruncated,
		Stderr: text(stderr), StderrTruncated: stderrTruncated,
		WallSeconds: result.Wall.Seconds(), CPUSeconds: result.CPU.Seconds(),
	}
	if result.Signal != 0 {
		answer.Signal = &result.Signal
	}
	return answer
}

// text makes output fit for JSON: what is not UTF-8 becomes replacement characters.
func text(output []byte) string { return strings.ToValidUTF8(string(output), "\uFFFD") }
