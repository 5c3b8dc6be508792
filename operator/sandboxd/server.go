package main

import (
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"os"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"agentfly.dev/sandboxd/admin"
	"agentfly.dev/sandboxd/lease"
	"agentfly.dev/sandboxd/proc"
)

// processes and baseline are what the server needs of the packages proc and pristine; a test puts
// its own there, because the real ones kill everything that they see.
type processes interface {
	Open()
	Run(context.Context, proc.Spec) (proc.Result, error)
	KillAll(time.Duration) error
}

type baseline interface {
	Method() string
	Restore() error
	Verify() error
}

// tenancy is one lease: what the requests of its holder share.
type tenancy struct {
	ctx  context.Context // ends with the lease
	end  context.CancelFunc
	jobs *jobs
}

type server struct {
	cfg         config
	processes   processes
	baseline    baseline
	oomKills    counter
	door        *admin.Door
	handOver    func(connection uintptr) error // where a keeper resets: gives it what to answer on; else nil
	users       users
	now         func() time.Time
	bodies      *budget
	answers     *budget
	connections *connections
	holders     atomic.Int64 // requests of the lease that are being served

	mu       sync.Mutex // guards what follows
	lease    *lease.Lease
	held     *tenancy
	expiry   *time.Timer
	running  int
	lastUsed time.Time

	cleaning  sync.Mutex   // one reset or expiry at a time; held while the sandbox is dirty by either
	transfers sync.RWMutex // read-held by an upload or download, so that a reset never empties under one
}

func newServer(cfg config, p processes, b baseline, oom counter, now func() time.Time) (*server, error) {
	door, err := cfg.door()
	if err != nil {
		return nil, err
	}
	return &server{cfg: cfg, processes: p, baseline: b, oomKills: oom, door: door, users: openUsers(), now: now,
		bodies: newBudget(maxBodyUnits), answers: newBudget(maxLargeAnswers), connections: &connections{limit: maxConnections},
		lease: lease.New(cfg.Incarnation), held: noTenancy(), lastUsed: now()}, nil
}

func noTenancy() *tenancy {
	none := newTenancy(0)
	none.end()
	return none
}

func newTenancy(number int) *tenancy {
	ctx, end := context.WithCancel(context.Background())
	return &tenancy{ctx, end, newJobs(strconv.Itoa(number))}
}

// holder returns the lease that the token holds.
func (s *server) holder(token string) (*tenancy, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.lease.Check(s.now(), token); err != nil {
		return nil, err
	}
	s.lastUsed = s.now()
	return s.held, nil
}

func (s *server) health(_ http.ResponseWriter, _ *http.Request) (reply, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := s.now()
	view := s.lease.See(now)
	reset := map[string]any{"method": s.baseline.Method()}
	if s.cfg.Pod != nil {
		reset["refused"] = s.cfg.Pod.Refused
	}
	state := map[string]any{
		"state": view.State, "incarnation": view.Incarnation, "leases": view.Leases, "owner": nil,
		"expiresInSeconds": nil, "idleSeconds": now.Sub(s.lastUsed).Seconds(), "version": version,
		"member": s.cfg.Member, "ownerKey": s.cfg.AdminKey, "boot": s.cfg.Boot, "reset": reset,
	}
	if view.State == lease.Leased {
		state["owner"], state["expiresInSeconds"] = view.Owner, view.Expires.Sub(now).Seconds()
	}
	if s.running > 0 {
		state["idleSeconds"] = 0.0
	}
	return reply{value: state}, nil
}

// showLease is for an owner who has forgotten whom it gave the sandbox to.
func (s *server) showLease(_ http.ResponseWriter, _ *http.Request) (reply, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := s.now()
	view := s.lease.See(now)
	shown := map[string]any{"state": view.State, "incarnation": view.Incarnation, "owner": nil, "attempt": nil, "note": "",
		"expiresInSeconds": nil}
	if view.State == lease.Leased {
		shown["owner"], shown["attempt"], shown["note"] = view.Owner, view.Attempt, view.Note
		shown["expiresInSeconds"] = view.Expires.Sub(now).Seconds()
	}
	return reply{value: shown}, nil
}

func (s *server) takeLease(_ http.ResponseWriter, r *http.Request) (reply, error) {
	var body struct {
		Owner      string  `json:"owner"`
		Attempt    int     `json:"attempt"`
		Token      string  `json:"token"`
		TTLSeconds float64 `json:"ttlSeconds"`
		Note       string  `json:"note"`
	}
	if err := decode(r.Body, &body); err != nil {
		return reply{}, err
	}
	ttl := seconds(body.TTLSeconds)
	switch {
	case body.Owner == "":
		return reply{}, badRequest("owner: is empty")
	case body.Token == "":
		return reply{}, badRequest("token: is empty")
	case ttl <= 0 || ttl > maxTTL:
		return reply{}, badRequest("ttlSeconds: not above 0 and at most an hour")
	case len(body.Note) > maxNoteBytes:
		return reply{}, badRequest("note: has " + strconv.Itoa(len(body.Note)) + " bytes, more than " + strconv.Itoa(maxNoteBytes))
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	renewed, err := s.lease.Take(s.now(), lease.Request{Owner: body.Owner, Attempt: body.Attempt, Token: body.Token, TTL: ttl,
		Note: body.Note})
	if err != nil {
		return reply{}, err
	}
	if renewed {
		s.expiry.Reset(ttl)
	} else {
		s.held = newTenancy(s.lease.See(s.now()).Leases)
		s.expiry = time.AfterFunc(ttl, s.expire)
		s.lastUsed = s.now()
		s.processes.Open()
	}
	view := s.lease.See(s.now())
	return reply{value: map[string]any{"state": view.State, "incarnation": view.Incarnation, "ttlSeconds": ttl.Seconds()}}, nil
}

// endTenancy ends and forgets what the holder of the lease had; the caller holds the lock.
func (s *server) endTenancy() {
	s.held.end()
	s.held = noTenancy()
}

// expire runs when a TTL has passed. A renewal or a reset may have come first: the state decides.
func (s *server) expire() {
	s.cleaning.Lock()
	defer s.cleaning.Unlock()
	s.mu.Lock()
	dirty := s.lease.See(s.now()).State == lease.Dirty
	if dirty {
		s.endTenancy()
	}
	s.mu.Unlock()
	if dirty {
		_ = s.processes.KillAll(killWait) // the state is dirty already; a reset will find what is left
	}
}

// reset takes the lease away, kills, empties, verifies. Whatever is found stays the answer for ever.
func (s *server) reset(w http.ResponseWriter, r *http.Request) (reply, error) {
	began := time.Now()
	s.cleaning.Lock()
	defer s.cleaning.Unlock()
	s.mu.Lock()
	s.lease.Revoke()
	s.endTenancy()
	if s.expiry != nil {
		s.expiry.Stop()
	}
	residue := s.lease.Residue()
	s.mu.Unlock()
	if s.handOver != nil {
		return reply{}, s.passOn(w, r)
	}
	s.transfers.Lock()
	defer s.transfers.Unlock()
	if err := s.clean(); err != nil && residue == "" {
		residue = err.Error()
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.lease.Cleaned(residue)
	s.lastUsed = s.now()
	report := map[string]any{"clean": residue == "", "method": s.baseline.Method(),
		"milliseconds": float64(time.Since(began).Microseconds()) / 1000}
	if residue != "" {
		report["reason"] = residue
	} else {
		report["incarnation"] = s.lease.See(s.now()).Incarnation
	}
	return reply{value: report}, nil
}

// passOn gives the request's connection to the keeper, who ends this process and answers. The request is read to its
// end first: what is left of it would make the kernel cut the connection instead of closing it.
func (s *server) passOn(w http.ResponseWriter, r *http.Request) error {
	if _, err := io.Copy(io.Discard, r.Body); err != nil {
		return err
	}
	conn, _, err := http.NewResponseController(w).Hijack()
	if err != nil {
		return err
	}
	defer conn.Close()
	ours, is := conn.(*connection)
	if !is {
		return errPassedOn
	}
	tcp, is := ours.Conn.(*net.TCPConn)
	if !is {
		return errPassedOn
	}
	raw, err := tcp.SyscallConn()
	if err == nil { // without a copy: a tenant may have lowered the number of descriptors that there can be
		controlled := raw.Control(func(fd uintptr) { err = s.handOver(fd) })
		err = errors.Join(err, controlled)
	}
	if err != nil {
		os.Exit(1) // the keeper notices, and replaces this sandbox all the same
	}
	return errPassedOn
}

func (s *server) clean() error {
	if err := s.processes.KillAll(killWait); err != nil {
		return err
	}
	if err := s.baseline.Restore(); err != nil {
		return err
	}
	return s.baseline.Verify()
}

func seconds(n float64) time.Duration { return time.Duration(n * float64(time.Second)) }
