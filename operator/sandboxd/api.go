package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"math"
	"net/http"
	"os"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"agentfly.dev/sandboxd/lease"
	"agentfly.dev/sandboxd/proc"
)

// Every bound of the daemon, with its reason.
const (
	maxConfigBytes   = 64 << 10         // a token, a few paths, an environment
	maxHeaderBytes   = 16 << 10         // a request has one header of ours
	headerTimeout    = 10 * time.Second // a client that stalls in its header holds a connection
	idleTimeout      = 10 * time.Minute // rollouts pause between calls while the model thinks
	maxLeaseBytes    = 64 << 10         // a note may be six times as long in JSON
	maxNoteBytes     = 8 << 10
	maxExecBytes     = 8 << 20 // standard input travels in the request
	freeBodyBytes    = 64 << 10
	bodyUnitBytes    = 1 << 20
	maxBodyUnits     = 16              // of all requests and commands at once; larger bodies wait for each other
	bodyWait         = 5 * time.Second // what clients add to the time of a command
	bodyTime         = time.Minute     // of a body on its way, which holds a slot
	answerTime       = time.Minute     // of an answer on its way, which holds a place and its memory
	largeAnswerBytes = 64 << 10        // of output, which may be six times as long in JSON;
	maxLargeAnswers  = 4               // of these that are written at once, others wait for them
	maxFileBytes     = 8 << 30         // unless the configuration says otherwise; streamed, so no bound on memory
	maxOutputBytes   = 1 << 20         // times maxCommands times two streams = what a flood can make us keep
	maxCommands      = 16              // at once
	maxFinished      = 64              // commands that are remembered after their end,
	maxFinishedBytes = 8 << 20         // and the bytes of their output
	maxKeys          = 1024            // more than any client repeats; each is small
	maxKeyBytes      = 128
	comeBack         = time.Second      // a client that lost its connection repeats the request at once
	maxWait          = 30 * time.Second // of a long poll: less than what proxies allow
	cancelWait       = 6 * time.Second  // a group that is killed ends within KillWait and Grace
	maxConnections   = 128              // each costs some 30 KiB
	maxHolders       = 64               // requests of a lease at once: the rest is left to its owner
	maxTimeout       = 24 * time.Hour
	maxTTL           = time.Hour
	defaultOutput    = 64 << 10
	defaultTimeout   = 30 * time.Second
	killWait         = 5 * time.Second // of a reset; a process in an uninterruptible call condemns
	defaultFileMode  = 0o644
)

// access says which token a route needs. Its zero value is not a route.
type access int

const (
	public access = iota + 1
	adminOnly
	leaseHolder
)

// reply is what a handler returns: a value to show as JSON, or a file to stream.
type reply struct {
	value any
	file  *os.File
	size  int64
	done  func() // to be called once the file is sent
}

type route struct {
	method, path string
	access       access
	limit        int64 // bytes of request body
	handle       func(*server, http.ResponseWriter, *http.Request) (reply, error)
}

var routes = []route{
	{"GET", "/healthz", public, 0, (*server).health},
	{"GET", "/lease", adminOnly, 0, (*server).showLease},
	{"POST", "/lease", adminOnly, maxLeaseBytes, (*server).takeLease},
	{"POST", "/reset", adminOnly, maxLeaseBytes, (*server).reset},
	{"POST", "/exec", leaseHolder, maxExecBytes, (*server).exec},
	{"GET", "/exec/{id}", leaseHolder, 0, (*server).pollExec},
	{"DELETE", "/exec/{id}", leaseHolder, 0, (*server).cancelExec},
	{"PUT", "/files", leaseHolder, math.MaxInt64, (*server).putFile}, // bounded by the configuration
	{"GET", "/files", leaseHolder, 0, (*server).getFile},
}

// apiError is an error with its place in HTTP.
type apiError struct {
	status        int
	code, message string
}

func (e apiError) Error() string { return e.message }

func badRequest(message string) error {
	return apiError{http.StatusBadRequest, "BadRequest", message}
}

// errPassedOn says that somebody else has the connection.
var errPassedOn = errors.New("the connection was passed on")

// classify gives every error its one code.
func classify(err error) apiError {
	var known apiError
	var tooLarge *http.MaxBytesError
	switch {
	case errors.As(err, &known):
		return known
	case errors.Is(err, lease.ErrLost), errors.Is(err, proc.ErrClosed):
		return apiError{http.StatusGone, "LeaseLost", err.Error()}
	case errors.Is(err, lease.ErrBusy):
		return apiError{http.StatusConflict, "Busy", err.Error()}
	case errors.Is(err, lease.ErrDirty):
		return apiError{http.StatusConflict, "Dirty", err.Error()}
	case errors.As(err, &tooLarge):
		return apiError{http.StatusRequestEntityTooLarge, "TooLarge",
			"body: more than " + strconv.FormatInt(tooLarge.Limit, 10) + " bytes"}
	case errors.Is(err, os.ErrNotExist), errors.Is(err, syscall.ENOTDIR):
		return apiError{http.StatusNotFound, "NotFound", err.Error()}
	case errors.Is(err, os.ErrPermission), errors.Is(err, syscall.EROFS), errors.Is(err, syscall.EISDIR),
		errors.Is(err, syscall.ENOSPC), errors.Is(err, syscall.ELOOP), errors.Is(err, syscall.ENXIO),
		errors.Is(err, syscall.ENAMETOOLONG), errors.Is(err, syscall.EEXIST), errors.Is(err, syscall.EBUSY),
		errors.Is(err, syscall.EDQUOT), errors.Is(err, syscall.EFBIG):
		return apiError{http.StatusBadRequest, "BadRequest", err.Error()}
	case errors.Is(err, proc.ErrStuck):
		return apiError{http.StatusGatewayTimeout, "Timeout", err.Error()}
	}
	return apiError{http.StatusInternalServerError, "Internal", err.Error()}
}

// ServeHTTP finds the route, checks its token, runs it, and writes the one answer.
func (s *server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	answer, err := reply{}, error(apiError{http.StatusNotFound, "NotFound", "path: no " + r.Method + " " + r.URL.Path})
	control, held := http.NewResponseController(w), (*tenancy)(nil)
	_ = control.SetWriteDeadline(time.Time{}) // of the last answer of this connection
	if route := find(r); route != nil {
		var leave func()
		if held, leave, err = s.admit(route, r); err == nil {
			defer leave()
			r.Body = http.MaxBytesReader(w, r.Body, route.limit)
			answer, err = route.handle(s, w, r)
		}
	}
	if errors.Is(err, errPassedOn) {
		return
	}
	if answer.file == nil {
		_ = control.SetWriteDeadline(time.Now().Add(answerTime))
	}
	if err == nil && answer.file == nil && held != nil {
		var done func()
		if done, err = s.bound(r, control, held, answer.value); err == nil {
			defer done()
		}
	}
	if err != nil {
		problem := classify(err)
		writeJSON(w, problem.status, map[string]any{
			"error": map[string]string{"code": problem.code, "message": problem.message}})
		return
	}
	if answer.file != nil {
		defer answer.done()
		w.Header().Set("Content-Type", "application/octet-stream")
		w.Header().Set("Content-Length", strconv.FormatInt(answer.size, 10))
		_, _ = io.CopyN(w, answer.file, answer.size) // a file that shrank ends the connection
		return
	}
	writeJSON(w, http.StatusOK, answer.value)
}

// bound keeps an answer within its lease, and large ones within their share of memory. The next lease is not to
// find places taken by readers of this one who stall.
func (s *server) bound(r *http.Request, control *http.ResponseController, held *tenancy, value any) (done func(), err error) {
	units := 0
	if output, has := value.(interface{ outputBytes() int }); has && output.outputBytes() > largeAnswerBytes {
		if units = 1; !s.answers.take(r.Context(), units, answerTime) {
			return nil, apiError{http.StatusConflict, "Busy", "answer: too many large ones at once"}
		}
		_ = control.SetWriteDeadline(time.Now().Add(answerTime))
	}
	if held.ctx.Err() != nil {
		s.answers.give(units)
		return nil, lease.ErrLost
	}
	stop := context.AfterFunc(held.ctx, func() { _ = control.SetWriteDeadline(time.Unix(1, 0)) })
	return func() { stop(); s.answers.give(units) }, nil
}

func find(r *http.Request) *route {
	for at := range routes {
		if routes[at].method == r.Method && routes[at].leadsTo(r) {
			return &routes[at]
		}
	}
	return nil
}

// admit checks the token of a request, and gives it its place among those of the lease, if it is of one.
func (s *server) admit(route *route, r *http.Request) (held *tenancy, leave func(), err error) {
	if held, err = s.authorize(route.access, bearer(r)); err != nil {
		return nil, nil, err
	}
	if route.access == public {
		return nil, func() {}, nil
	}
	if route.access == leaseHolder && s.holders.Add(1) > maxHolders {
		s.holders.Add(-1)
		return nil, nil, apiError{http.StatusConflict, "Busy", "requests: too many at once"}
	}
	served := s.connections.serving(r)
	return held, func() {
		served()
		if route.access == leaseHolder {
			s.holders.Add(-1)
		}
	}, nil
}

// leadsTo compares paths; the one variable segment becomes the path value "id".
func (route *route) leadsTo(r *http.Request) bool {
	folder, variable := strings.CutSuffix(route.path, "{id}")
	if !variable {
		return route.path == r.URL.Path
	}
	id, found := strings.CutPrefix(r.URL.Path, folder)
	r.SetPathValue("id", id)
	return found && id != "" && !strings.Contains(id, "/")
}

// authorize returns the lease too where the route needs one.
func (s *server) authorize(needed access, token string) (*tenancy, error) {
	switch needed {
	case public:
		return nil, nil
	case adminOnly:
		if s.door.Opens(token) {
			return nil, nil
		}
	case leaseHolder:
		if token != "" {
			return s.holder(token)
		}
	}
	return nil, apiError{http.StatusUnauthorized, "Unauthorized", "authorization: no bearer token for this route"}
}

func bearer(r *http.Request) string {
	token, found := strings.CutPrefix(r.Header.Get("Authorization"), "Bearer ")
	if !found {
		return ""
	}
	return token
}

// decode reads one JSON object and the end of the body: only then does the server notice that a
// client has gone.
func decode(body io.Reader, into any) error {
	decoder := json.NewDecoder(body)
	decoder.DisallowUnknownFields()
	err := decoder.Decode(into)
	var tooLarge *http.MaxBytesError
	if err != nil && !errors.As(err, &tooLarge) {
		err = badRequest("body: " + err.Error())
	}
	if err != nil {
		return err
	}
	_, err = io.Copy(io.Discard, body)
	return err
}

// Bodies of answers: most are small, and a daemon that lives for months should not grow by them.
var bodies = sync.Pool{New: func() any { return new(bytes.Buffer) }}

func writeJSON(w http.ResponseWriter, status int, value any) {
	body := bodies.Get().(*bytes.Buffer)
	body.Reset()
	defer func() {
		if body.Cap() <= freeBodyBytes {
			bodies.Put(body)
		}
	}()
	encoder := json.NewEncoder(body)
	encoder.SetEscapeHTML(false)
	_ = encoder.Encode(value) // all that is answered can be encoded
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Content-Length", strconv.Itoa(body.Len())) // else a long one comes in chunks
	w.WriteHeader(status)
	_, _ = w.Write(body.Bytes()) // the client has gone
}
