// Command sandboxd is the first process of a sandbox: it runs the commands of whoever holds the
// lease, kills them when the lease ends, and proves that the sandbox is clean before the next one.
//
// Guarantees:
//  1. It is PID 1 or it does not run: its reset kills every other process that it can see.
//  2. It lives as long as its owner: the end of its standard input ends it, and with it everything
//     in its process namespace.
//  3. Commands see nothing of it: no socket path, no open descriptor, no environment, no memory.
package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"agentfly.dev/sandboxd/pristine"
	"agentfly.dev/sandboxd/proc"
)

const (
	version     = "0.1.0"
	resetOutput = 1000 // bytes of what a program of a reset says, for the reason why it failed
)

// asShell is the shell line by which enroot starts a program. An image need not have a shell.
const asShell = `exec "$@"`

// config is the one line of JSON that the owner writes to standard input.
type config struct {
	AdminToken  string            `json:"adminToken"`
	Scratch     []string          `json:"scratch"`     // folders emptied at reset
	Upper       string            `json:"upper"`       // where writes to the root go, "" when it is read-only
	Workdir     string            `json:"workdir"`     // where commands start
	OwnNetwork  bool              `json:"ownNetwork"`  // the sandbox shares its network with nobody
	Env         map[string]string `json:"env"`         // of every command
	Incarnation int               `json:"incarnation"` // the first one of this process
	Limits      limits            `json:"limits"`      // where no cgroup sets them
	Reset       *pristine.Reset   `json:"reset"`       // nil where only the upper and scratch can be written

	FileLimitBytes int64 `json:"fileLimitBytes"` // of one file on its way in or out; 0 for maxFileBytes
}

func main() {
	listenFD := flag.Int("listen-fd", -1, "inherited descriptor of a listening socket")
	listen := flag.String("listen", "", "address to listen on, for example tcp://:7070")
	handover := flag.String("handover", "", "unix socket of the owner, who sends the listening socket over it")
	oomFD := flag.Int("oom-fd", -1, "inherited descriptor of the cgroup file that counts out-of-memory kills")
	showVersion := flag.Bool("version", false, "print the version and exit")
	line := flag.String("c", "", "be the shell of whoever starts every program by one: only 'exec \"$@\"' NAME PROGRAM ARGUMENTS")
	flag.Parse()
	if *line == asShell && flag.NArg() > 2 {
		_ = flag.CommandLine.Parse(flag.Args()[2:]) // ends the program itself, as Parse did
	}
	if *showVersion {
		fmt.Println(version)
		return
	}
	if err := run(*listenFD, *listen, *handover, *oomFD); err != nil {
		fmt.Fprintln(os.Stderr, "sandboxd:", err)
		os.Exit(1)
	}
}

func run(listenFD int, listen, handover string, oomFD int) error {
	if os.Getpid() != 1 {
		return errors.New("pid: must be 1, the first process of a pid namespace (bwrap --as-pid-1, or a container)")
	}
	if err := hide(listenFD, oomFD); err != nil {
		return err
	}
	listener, oom, err := openListener(listenFD, listen, handover, oomFD)
	if err != nil {
		return err
	}
	stdin := bufio.NewReaderSize(os.Stdin, maxConfigBytes)
	cfg, err := readConfig(stdin)
	if err != nil {
		return err
	}
	if err := cfg.Limits.apply(); err != nil {
		return err
	}
	table := proc.NewTable()
	ended := takeSignals() // before the first command can end
	go func() {
		for range ended {
			table.Reap()
		}
	}()
	baseline, err := pristine.Record(pristine.Config{
		Scratch: cfg.Scratch, Upper: cfg.Upper, OwnNetwork: cfg.OwnNetwork, Reset: cfg.Reset, Run: runner(cfg, table)})
	if err != nil {
		return fmt.Errorf("baseline: %w", err)
	}
	primeThreads(spareThreads)
	if err := dropFaults(); err != nil {
		return err
	}
	go func() {
		_, _ = io.Copy(io.Discard, stdin)
		os.Exit(0)
	}()
	s := newServer(cfg, table, baseline, oom, time.Now)
	return s.serve(listener)
}

// runner runs the image's own programs for a reset, between two leases: the table is open for them alone,
// because no context of a lease is alive.
func runner(cfg config, table *proc.Table) pristine.Run {
	return func(argv, env []string, folder, stdin string, timeout time.Duration) error {
		for name, value := range cfg.Env {
			env = append(env, name+"="+value)
		}
		words := proc.NewOutput(resetOutput)
		table.Open()
		result, err := table.Run(context.Background(), proc.Spec{Argv: argv, Env: append(env, "PATH="+defaultPath),
			Dir: folder, Stdin: stdin, Timeout: timeout, Stdout: proc.NewOutput(0), Stderr: words})
		if killed := table.KillAll(killWait); err == nil {
			err = killed
		}
		switch {
		case err != nil:
			return err
		case result.TimedOut:
			return fmt.Errorf("%s was not done after %v", argv[0], timeout)
		case result.ExitCode != 0:
			last, _ := words.Kept()
			return fmt.Errorf("%s ended with %d: %s", argv[0], result.ExitCode, bytes.TrimSpace(last))
		}
		return nil
	}
}

func readConfig(stdin *bufio.Reader) (config, error) {
	line, err := stdin.ReadSlice('\n')
	if err != nil {
		return config{}, fmt.Errorf("config: no line of at most %d bytes on standard input: %w", maxConfigBytes, err)
	}
	var cfg config
	decoder := json.NewDecoder(strings.NewReader(string(line)))
	decoder.DisallowUnknownFields()
	if err := decoder.Decode(&cfg); err != nil {
		return config{}, fmt.Errorf("config: %w", err)
	}
	clear(line) // the token must not stay in a buffer
	if cfg.AdminToken == "" {
		return config{}, errors.New("config: adminToken is empty")
	}
	return cfg, nil
}

func openListener(fd int, address, handover string, oomFD int) (listener net.Listener, oom counter, err error) {
	if handover != "" {
		return receive(handover)
	}
	if fd >= 0 {
		file := os.NewFile(uintptr(fd), "listener")
		defer file.Close()
		listener, err = net.FileListener(file)
		return listener, openCounter(oomFD), err
	}
	if tcp, found := strings.CutPrefix(address, "tcp://"); found {
		listener, err = net.Listen("tcp", tcp)
		return listener, openCounter(oomFD), err
	}
	return nil, counter{}, fmt.Errorf("--listen: %q is not tcp://host:port, and no --listen-fd or --handover is given", address)
}

// takeSignals returns the signals that tell of ended processes. The first process of a namespace
// ignores only the signals without a handler, and Go has handlers for nearly all: those are taken
// and dropped, so that a command cannot end the daemon by kill. dropFaults has the others.
func takeSignals() <-chan os.Signal {
	dropped, ended := make(chan os.Signal, 1), make(chan os.Signal, 1)
	for number := syscall.Signal(1); number < 32; number++ {
		switch number {
		case syscall.SIGKILL, syscall.SIGSTOP, syscall.SIGCHLD, syscall.SIGURG:
		case syscall.SIGILL, syscall.SIGTRAP, syscall.SIGBUS, syscall.SIGFPE, syscall.SIGSEGV,
			syscall.SIGSTKFLT, syscall.SIGSYS:
		default:
			signal.Notify(dropped, number)
		}
	}
	signal.Notify(ended, syscall.SIGCHLD)
	return ended
}

func (s *server) serve(listener net.Listener) error {
	server := &http.Server{
		Handler:           s,
		ReadHeaderTimeout: headerTimeout,
		IdleTimeout:       idleTimeout,
		MaxHeaderBytes:    maxHeaderBytes,
		ConnContext: func(ctx context.Context, made net.Conn) context.Context {
			return context.WithValue(ctx, connectionKey{}, made)
		},
	}
	return server.Serve(counted{listener, s.connections})
}
