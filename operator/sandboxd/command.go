package main

import (
	"maps"
	"os"
	"slices"
	"strings"

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
	User             string            `json:"user"`
	TimeoutSeconds   *float64          `json:"timeoutSeconds"`
	OutputLimitBytes *int              `json:"outputLimitBytes"`
	WaitSeconds      *float64          `json:"waitSeconds"`
}

// command checks a request and fills in what it leaves out.
func (s *server) command(body execRequest) (proc.Spec, error) {
	spec := proc.Spec{Argv: body.Argv, Dir: body.Cwd, Stdin: body.Stdin, Timeout: defaultTimeout}
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
	limit := defaultOutput
	if body.OutputLimitBytes != nil {
		if limit = *body.OutputLimitBytes; limit < 0 || limit > maxOutputBytes {
			return spec, badRequest("outputLimitBytes: not between 0 and 1048576")
		}
	}
	spec.Stdout, spec.Stderr = proc.NewOutput(limit), proc.NewOutput(limit)
	if spec.Dir == "" {
		spec.Dir = s.cfg.Workdir
	}
	if info, err := os.Stat(spec.Dir); spec.Dir != "" && (err != nil || !info.IsDir()) {
		return spec, badRequest("cwd: " + spec.Dir + " is not a folder")
	}
	env := map[string]string{"PATH": defaultPath}
	maps.Copy(env, s.cfg.Env)
	if body.User != "" {
		account, err := s.users.find(body.User)
		if err != nil {
			return spec, err
		}
		spec.User = &account.User
		maps.Copy(env, account.env())
	}
	maps.Copy(env, body.Env)
	for _, name := range slices.Sorted(maps.Keys(env)) {
		if name == "" || strings.ContainsAny(name, "=\x00") || strings.ContainsRune(env[name], 0) {
			return spec, badRequest("env: a name is empty or has = or NUL in it")
		}
		spec.Env = append(spec.Env, name+"="+env[name])
	}
	return spec, nil
}
