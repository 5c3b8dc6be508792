package main

import (
	"context"
	"maps"
	"net/http"
	"os"
	"slices"
	"strings"

	"agentfly.dev/sandboxd/lease"
	"agentfly.dev/sandboxd/proc"
)

const (
	shell       = "/bin/sh"
	defaultPath = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
)

type execRequest struct {
	Argv             []string          `json:"argv"`
	Command          string            `json:"command"`
	Env              map[string]string `json:"env"`
	Cwd              string            `json:"cwd"`
	Stdin            string            `json:"stdin"`
	TimeoutSeconds   *float64          `json:"timeoutSeconds"`
	OutputLimitBytes *int              `json:"outputLimitBytes"`
}

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

func (s *server) exec(_ http.ResponseWriter, r *http.Request) (reply, error) {
	var body execRequest
	if err := decode(r, &body); err != nil {
		return reply{}, err
	}
	spec, err := s.command(body)
	if err != nil {
		return reply{}, err
	}
	held, err := s.holder(bearer(r))
	if err != nil {
		return reply{}, err
	}
	if !s.enter() {
		return reply{}, apiError{http.StatusConflict, "Busy", "exec: too many commands at once"}
	}
	defer s.leave()
	// A child of the lease's context ends in the same instant: what has not started by then never does.
	ctx, cancel := context.WithCancel(held)
	defer cancel()
	defer context.AfterFunc(r.Context(), cancel)() // the client has gone
	before := s.oomKills.read()
	result, err := s.processes.Run(ctx, spec)
	if held.Err() != nil {
		return reply{}, lease.ErrLost
	}
	if err != nil {
		return reply{}, err
	}
	return reply{value: render(result, s.oomKills.read() > before)}, nil
}

// command checks a request and fills in what it leaves out.
func (s *server) command(body execRequest) (proc.Spec, error) {
	spec := proc.Spec{Argv: body.Argv, Dir: body.Cwd, Stdin: body.Stdin, Timeout: defaultTimeout, OutputLimit: defaultOutput}
	if (body.Command == "") == (len(body.Argv) == 0) {
		return spec, badRequest("argv, command: exactly one of the two is needed")
	}
	if body.Command != "" {
		spec.Argv = []string{shell, "-c", body.Command}
	}
	if spec.Argv[0] == "" || strings.ContainsRune(strings.Join(spec.Argv, ""), 0) {
		return spec, badRequest("argv: empty name or NUL byte")
	}
	if body.TimeoutSeconds != nil {
		if spec.Timeout = seconds(*body.TimeoutSeconds); spec.Timeout <= 0 || spec.Timeout > maxTimeout {
			return spec, badRequest("timeoutSeconds: not above 0 and at most a day")
		}
	}
	if body.OutputLimitBytes != nil {
		if spec.OutputLimit = *body.OutputLimitBytes; spec.OutputLimit < 0 || spec.OutputLimit > maxOutputBytes {
			return spec, badRequest("outputLimitBytes: not between 0 and 1048576")
		}
	}
	if spec.Dir == "" {
		spec.Dir = s.cfg.Workdir
	}
	if info, err := os.Stat(spec.Dir); spec.Dir != "" && (err != nil || !info.IsDir()) {
		return spec, badRequest("cwd: " + spec.Dir + " is not a folder")
	}
	env := map[string]string{"PATH": defaultPath}
	maps.Copy(env, s.cfg.Env)
	maps.Copy(env, body.Env)
	for _, name := range slices.Sorted(maps.Keys(env)) {
		if name == "" || strings.ContainsAny(name, "=\x00") || strings.ContainsRune(env[name], 0) {
			return spec, badRequest("env: a name is empty or has = or NUL in it")
		}
		spec.Env = append(spec.Env, name+"="+env[name])
	}
	return spec, nil
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

func render(result proc.Result, oom bool) execReply {
	answer := execReply{
		ExitCode: result.ExitCode, TimedOut: result.TimedOut, OOM: oom,
		Stdout: text(result.Stdout), StdoutTruncated: result.StdoutTruncated,
		Stderr: text(result.Stderr), StderrTruncated: result.StderrTruncated,
		WallSeconds: result.Wall.Seconds(), CPUSeconds: result.CPU.Seconds(),
	}
	if result.Signal != 0 {
		answer.Signal = &result.Signal
	}
	return answer
}

// text makes output fit for JSON: what is not UTF-8 becomes replacement characters.
func text(output []byte) string { return strings.ToValidUTF8(string(output), "\uFFFD") }
