package main

import (
	"bytes"
	"context"
	"fmt"
	"net/http/httptest"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"agentfly.dev/sandboxd/proc"
)

// Each target runs its seeds with the other tests; `go test -fuzz=NAME` searches on.

// A body is either refused with a client's error and leaves nothing behind, or becomes a command within the
// bounds.
func FuzzExecBody(f *testing.F) {
	for _, body := range []string{`{"command":"x"}`, `{"argv":["a","b"],"env":{"A":"1"},"cwd":"/","stdin":"s","timeoutSeconds":1e3,"outputLimitBytes":9}`,
		`{"command":"x","user":"0:0","waitSeconds":0}`, `{"command":"x","timeoutSeconds":1e400}`, `{"command":"x","waitSeconds":-0.0}`, `{"argv":[""]}`,
		`{"command":"x","env":{"=":""}}`, `{}`, `[]`, ``, `{"command":"\u0000"}`, `{"command":"x"}garbage`, "{\"command\":\"\xff\"}", `null`, `{"timeoutSeconds":-1e-300,"command":"x"}`} {
		f.Add([]byte(body))
	}
	var spec proc.Spec
	w := &world{clock: time.Now(), run: func(_ context.Context, s proc.Spec) (proc.Result, error) { spec = s; return proc.Result{}, nil }}
	var err error
	if w.server, err = newServer(config{AdminToken: "admin", Workdir: "/"}, w, w, counter{}, func() time.Time { return w.clock }); err != nil {
		f.Fatal(err)
	}
	lease := httptest.NewRequest("POST", "/lease", strings.NewReader(`{"owner":"o","token":"t","ttlSeconds":600}`))
	lease.Header.Set("Authorization", "Bearer admin")
	w.server.ServeHTTP(httptest.NewRecorder(), lease)
	f.Fuzz(func(t *testing.T, body []byte) {
		spec = proc.Spec{}
		request := httptest.NewRequest("POST", "/exec", bytes.NewReader(body))
		request.Header.Set("Authorization", "Bearer t")
		answer := httptest.NewRecorder()
		w.server.ServeHTTP(answer, request)
		eventually(t, "nothing is held", func() bool { w.server.mu.Lock(); defer w.server.mu.Unlock(); return w.server.running == 0 })
		switch {
		case answer.Code == 200:
			if len(spec.Argv) == 0 || spec.Timeout <= 0 || spec.Timeout > maxTimeout || slices.ContainsFunc(append(spec.Env, spec.Argv...), func(s string) bool { return strings.ContainsRune(s, 0) }) {
				t.Errorf("%q became %+v", body, spec)
			}
		case answer.Code < 400 || answer.Code >= 500:
			t.Errorf("%q: %d %s", body, answer.Code, answer.Body)
		case spec.Argv != nil:
			t.Errorf("%q: ran and was refused", body)
		}
		if len(w.server.bodies.units) != 0 || w.server.holders.Load() != 0 {
			t.Error("memory or a place is held", len(w.server.bodies.units), w.server.holders.Load())
		}
	})
}

// Whatever the path: a file is written inside the folder that its links lead to, or nothing is, and what was
// written is read back by the same path.
func FuzzFilePath(f *testing.F) {
	for _, path := range []string{"x", "a/b/c", "link", "link/x", "../x", "folder/../x", "loop", "loop/x", "pipe", "up", "proc", "", ".", "a//b", "x\x00y", strings.Repeat("n", 300), strings.Repeat("d/", 50), strings.Repeat("long", 2000)} {
		f.Add(path)
	}
	f.Fuzz(func(t *testing.T, path string) {
		root := t.TempDir()
		inside := root + "/inside"
		for _, err := range []error{os.Mkdir(inside, 0o755), os.Mkdir(inside+"/folder", 0o755), os.Symlink("folder/x", inside+"/link"), os.Symlink("loop", inside+"/loop"),
			os.Symlink("/proc/self/fd/0", inside+"/proc"), os.Symlink("folder", inside+"/up")} {
			if err != nil {
				t.Fatal(err)
			}
		}
		given, err := filePath(httptest.NewRequest("PUT", "/files?path="+url.QueryEscape(inside+"/"+path), nil))
		if err != nil || !strings.HasPrefix(given, root+"/") {
			return
		}
		_, err = writeFile(given, 0o644, strings.NewReader("content"))
		if err != nil {
			if problem := classify(err); problem.status >= 500 {
				t.Errorf("%q: %v", path, err)
			}
		} else if file, _, err := openRegular(given, os.O_RDONLY, 0); err != nil {
			t.Errorf("%q was written and cannot be read: %v", path, err)
		} else {
			file.Close()
		}
		_ = filepath.WalkDir(root, func(found string, entry os.DirEntry, err error) error {
			if err == nil && strings.Contains(entry.Name(), ".sandboxd-") {
				t.Errorf("%q left %s", path, found)
			}
			return err
		})
	})
}

// Any sequence of requests under keys: each key does one thing, for one request, and memory stays bounded.
func FuzzKeys(f *testing.F) {
	for _, seed := range []string{"a1a1a2b1", "c", "", "a1!a1a1", strings.Repeat("a1b2!", 40), "a1~a1"} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, moves []byte) {
		j := newJobs("1")
		did := map[string]byte{} // key -> its request
		for at := 0; at+1 < len(moves); at += 2 {
			key, body := string(moves[at]), moves[at+1]
			one := newJob(context.Background(), key, proc.Spec{Stdout: proc.NewOutput(maxOutputBytes), Stderr: proc.NewOutput(0)})
			_, _ = one.stdout.Write(make([]byte, int(body)<<13))
			known, err := j.claim(key, digest{body}, one, !j.knows(key))
			before, there := did[key]
			switch {
			case !there && (err != nil || known != nil):
				t.Fatalf("a fresh key: %v %v", known, err)
			case there && before != body && err == nil:
				t.Fatalf("key %q served another request", key)
			case there && before == body && err == nil && known == nil:
				t.Fatalf("key %q did it twice", key)
			}
			if !there {
				did[key] = body
				switch body % 3 {
				case 0:
					j.release(key)
					delete(did, key)
				default:
					j.name(one)
					j.end(one)
				}
			}
			if len(j.finished) > maxFinished || j.bytes > maxFinishedBytes || len(j.byID) != len(j.finished) || len(j.byKey) != len(j.keys) || len(j.keys) > maxKeys {
				t.Fatal(fmt.Sprint(len(j.finished), j.bytes, len(j.byID), len(j.byKey), len(j.keys)))
			}
		}
	})
}
