package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"agentfly.dev/sandboxd/proc"
)

// world is a server whose processes and file system are counted, not real.
type world struct {
	server  *server
	http    *httptest.Server
	opened  int
	killed  int
	residue error
	run     func(context.Context, proc.Spec) (proc.Result, error)
	clock   time.Time
}

func (w *world) Open()                       { w.opened++ }
func (w *world) KillAll(time.Duration) error { w.killed++; return nil }
func (w *world) Method() string              { return "overlay" }
func (w *world) Restore() error              { return nil }
func (w *world) Verify() error               { return w.residue }
func (w *world) Run(ctx context.Context, spec proc.Spec) (proc.Result, error) {
	defer spec.Stdout.Close()
	defer spec.Stderr.Close()
	return w.run(ctx, spec)
}

func newWorld(t *testing.T) *world {
	w := &world{clock: time.Now(), run: func(_ context.Context, spec proc.Spec) (proc.Result, error) {
		_, _ = spec.Stdout.Write([]byte("a\xffb<>&"))
		return proc.Result{}, nil
	}}
	var err error
	w.server, err = newServer(config{AdminToken: "admin", Incarnation: 4, Workdir: "/"}, w, w, counter{}, func() time.Time { return w.clock })
	if err != nil {
		t.Fatal(err)
	}
	w.http = httptest.NewServer(w.server)
	t.Cleanup(w.http.Close)
	return w
}

func (w *world) call(t *testing.T, method, path, token, body string) (int, map[string]any) {
	t.Helper()
	return w.keyed(t, "", method, path, token, body)
}

// keyed is a call under an Idempotency-Key.
func (w *world) keyed(t *testing.T, key, method, path, token, body string) (int, map[string]any) {
	t.Helper()
	request, err := http.NewRequest(method, w.http.URL+path, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	if key != "" {
		request.Header.Set("Idempotency-Key", key)
	}
	if token != "" {
		request.Header.Set("Authorization", "Bearer "+token)
	}
	answer, err := http.DefaultClient.Do(request)
	if err != nil {
		t.Fatal(err)
	}
	defer answer.Body.Close()
	var value map[string]any
	if err := json.NewDecoder(answer.Body).Decode(&value); err != nil {
		t.Fatal(err)
	}
	return answer.StatusCode, value
}

func code(value map[string]any) string {
	problem, _ := value["error"].(map[string]any)
	text, _ := problem["code"].(string)
	return text
}

func (w *world) lease(t *testing.T) {
	t.Helper()
	body := `{"owner":"o","attempt":0,"token":"lease","ttlSeconds":600}`
	if status, value := w.call(t, "POST", "/lease", "admin", body); status != 200 {
		t.Fatal(status, value)
	}
}

func TestEveryRouteDeclaresItsAccess(t *testing.T) {
	w := newWorld(t)
	w.lease(t)
	seen := map[string]bool{}
	for _, route := range routes {
		name := route.method + " " + route.path
		if seen[name] {
			t.Errorf("%s: twice in the table", name)
		}
		seen[name] = true
		if route.access < public || route.access > leaseHolder {
			t.Errorf("%s: declares no access", name)
			continue
		}
		if route.access == public {
			if name != "GET /healthz" {
				t.Errorf("%s: is public", name)
			}
			continue
		}
		if status, value := w.call(t, route.method, route.path, "", "{}"); status != 401 || code(value) != "Unauthorized" {
			t.Errorf("%s without a token: %d %v", name, status, value)
		}
		other := map[access]string{adminOnly: "lease", leaseHolder: "admin"}[route.access]
		if status, _ := w.call(t, route.method, route.path, other, "{}"); status != 401 && status != 410 {
			t.Errorf("%s with the other kind of token: %d", name, status)
		}
	}
}

func TestHealthSaysWhoseItIsAndNothingThatOpensIt(t *testing.T) {
	const key = "AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA="
	for _, cfg := range []config{{AdminKey: key, Member: "m", Boot: "b", Workdir: "/"}, {AdminToken: "secret", Workdir: "/"}} {
		w := newWorld(t)
		server, err := newServer(cfg, w, w, counter{}, time.Now)
		if err != nil {
			t.Fatal(err)
		}
		w.http.Config.Handler = server
		_, value := w.call(t, "GET", "/healthz", "", "")
		if value["ownerKey"] != cfg.AdminKey || value["member"] != cfg.Member || value["boot"] != cfg.Boot {
			t.Error(value)
		}
		if strings.Contains(fmt.Sprint(value), "secret") {
			t.Error(value)
		}
	}
}

func TestUnknownPathOrMethodIsNotFound(t *testing.T) {
	w := newWorld(t)
	for _, path := range []string{"/", "/exec/", "/lease/x"} {
		if status, value := w.call(t, "POST", path, "admin", "{}"); status != 404 || code(value) != "NotFound" {
			t.Errorf("%s: %d %v", path, status, value)
		}
	}
	if status, _ := w.call(t, "DELETE", "/exec", "lease", ""); status != 404 {
		t.Errorf("DELETE /exec: %d", status)
	}
}

func TestErrorsHaveOneShape(t *testing.T) {
	for err, want := range map[error]string{
		proc.ErrClosed:                    "LeaseLost",
		badRequest("x"):                   "BadRequest",
		&http.MaxBytesError{Limit: 1}:     "TooLarge",
		errors.New("anything else"):       "Internal",
		proc.ErrStuck:                     "Timeout",
		apiError{409, "Busy", "too many"}: "Busy",
	} {
		if got := classify(err); got.code != want || got.status < 400 || got.message == "" {
			t.Errorf("%v: %+v, want %s", err, got, want)
		}
	}
}

func TestOutputIsTextAndNotEscaped(t *testing.T) {
	w := newWorld(t)
	w.lease(t)
	if _, value := w.call(t, "POST", "/exec", "lease", `{"command":"x"}`); value["stdout"] != "a\uFFFDb<>&" || value["signal"] != nil {
		t.Error(value)
	}
}

func TestTooLargeBodyIsRefused(t *testing.T) {
	w := newWorld(t)
	body := `{"owner":"` + strings.Repeat("o", maxLeaseBytes) + `"}`
	if status, value := w.call(t, "POST", "/lease", "admin", body); status != 413 || code(value) != "TooLarge" {
		t.Error(status, value)
	}
}

func TestLeaseOpensAndResetKillsAndFrees(t *testing.T) {
	w := newWorld(t)
	w.lease(t)
	w.lease(t) // a heartbeat
	if w.opened != 1 {
		t.Errorf("opened %d times", w.opened)
	}
	if _, value := w.call(t, "POST", "/reset", "admin", "{}"); value["clean"] != true || w.killed != 1 {
		t.Error(value, w.killed)
	}
	if _, value := w.call(t, "GET", "/healthz", "", ""); value["state"] != "free" || value["incarnation"] != 5.0 {
		t.Error(value)
	}
}

func TestResidueStaysTheAnswer(t *testing.T) {
	w := newWorld(t)
	w.residue = errors.New("upper: /x was written")
	for range 2 {
		if _, value := w.call(t, "POST", "/reset", "admin", "{}"); value["clean"] != false || value["reason"] != "upper: /x was written" {
			t.Error(value)
		}
		w.residue = nil
	}
	body := `{"owner":"o","attempt":0,"token":"t","ttlSeconds":1}`
	if status, value := w.call(t, "POST", "/lease", "admin", body); status != 409 || code(value) != "Dirty" {
		t.Error(status, value)
	}
}

func TestExpiryKillsOnceTheTTLHasPassed(t *testing.T) {
	w := newWorld(t)
	w.lease(t)
	w.server.expire() // too early, as after a renewal
	if w.killed != 0 {
		t.Fatal("killed although the lease holds")
	}
	w.clock = w.clock.Add(601 * time.Second)
	w.server.expire()
	if w.killed != 1 {
		t.Fatal("not killed")
	}
	if status, value := w.call(t, "POST", "/exec", "lease", `{"command":"x"}`); status != 410 || code(value) != "LeaseLost" {
		t.Error(status, value)
	}
}

func TestExpiryAfterAResetAndANewLeaseKillsNobody(t *testing.T) {
	w := newWorld(t)
	w.lease(t)
	w.call(t, "POST", "/reset", "admin", "{}")
	w.lease(t)
	killed := w.killed
	w.server.expire() // the timer of the first lease, late
	if w.killed != killed {
		t.Error("the next tenant was killed")
	}
}

func TestCommandUnderWayWhenTheLeaseEndsIsLost(t *testing.T) {
	w := newWorld(t)
	started := make(chan struct{})
	w.run = func(ctx context.Context, _ proc.Spec) (proc.Result, error) {
		close(started)
		<-ctx.Done()
		return proc.Result{}, ctx.Err()
	}
	w.lease(t)
	answered := make(chan string)
	go func() {
		_, value := w.call(t, "POST", "/exec", "lease", `{"command":"x"}`)
		answered <- code(value)
	}()
	<-started
	w.call(t, "POST", "/reset", "admin", "{}")
	if got := <-answered; got != "LeaseLost" {
		t.Error(got)
	}
}
