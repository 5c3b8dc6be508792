// Command sandboxd is the first process of a sandbox: it runs the commands of whoever holds the
// lease, kills them when the lease ends, and proves that the sandbox is clean before the next one.
//
// Guarantees:
//  1. It is PID 1, or a child that PID 1 keeps, or it does not run: its reset kills every other process that it can see.
//  2. It lives as long as its owner, or its pod: the end of its standard input ends it, and with it everything in its
//     process namespace.
//  3. Commands see nothing of it: no socket path, no open descriptor, no environment, no memory.
package main

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"agentfly.dev/sandboxd/pod"
	"agentfly.dev/sandboxd/pristine"
	"agentfly.dev/sandboxd/proc"
)

const (
	version     = "0.1.0"
	resetOutput = 1000 // bytes of what a program of a reset says, for the reason why it failed
)

// asShell is the shell line by which enroot starts a program. An image need not have a shell.
const asShell = `exec "$@"`

func main() {
	listenFD := flag.Int("listen-fd", -1, "inherited descriptor of a listening socket")
	listen := flag.String("listen", "", "address to listen on, for example tcp://:7070")
	handover := flag.String("handover", "", "unix socket of the owner, who sends the listening socket over it")
	oomFD := flag.Int("oom-fd", -1, "inherited descriptor of the cgroup file that counts out-of-memory kills")
	showVersion := flag.Bool("version", false, "print the version and exit")
	inPod := flag.Bool("pod", false, "be the first process of a pod's container, configured by "+configEnv)
	configured := flag.Bool("configured", false, "with --pod: the configuration is on standard input")
	inner := flag.Bool(pod.Inner, false, "be the first process of a sandbox, for the keeper that starts it")
	line := flag.String("c", "", "be the shell of whoever starts every program by one: only 'exec \"$@\"' NAME PROGRAM ARGUMENTS")
	flag.Parse()
	if *line == asShell && flag.NArg() > 2 {
		_ = flag.CommandLine.Parse(flag.Args()[2:]) // ends the program itself, as Parse did
	}
	var err error
	switch {
	case *showVersion:
		fmt.Println(version)
	case flag.Arg(0) == "install":
		err = install(flag.Args()[1:])
	case flag.Arg(0) == "probe":
		err = probe(os.Stdout)
	case *inner:
		err = runInner(flag.Arg(0))
	case *inPod && !*configured:
		err = again(*listen)
	case *inPod:
		err = runPod(*listen)
	default:
		err = run(*listenFD, *listen, *handover, *oomFD)
	}
	if err != nil {
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
	endWith(stdin)
	return serveHere(cfg, listener, oom)
}

// endWith ends this process with its standard input.
func endWith(stdin io.Reader) {
	go func() {
		_, _ = io.Copy(io.Discard, stdin)
		os.Exit(0)
	}()
}

// serveHere makes this process the daemon of a sandbox that stays, and is put back.
func serveHere(cfg config, listener net.Listener, oom counter) error {
	table, err := newTable(cfg)
	if err != nil {
		return err
	}
	baseline, err := pristine.Record(pristine.Config{
		Scratch: cfg.Scratch, Upper: cfg.Upper, OwnNetwork: cfg.OwnNetwork, Reset: cfg.Reset, Run: runner(cfg, table)})
	if err != nil {
		return fmt.Errorf("baseline: %w", err)
	}
	if cfg.Pod != nil {
		maps.Copy(cfg.Pod.Refused, baseline.Refused())
	}
	primeThreads(spareThreads)
	if err := dropFaults(); err != nil {
		return err
	}
	s, err := newServer(cfg, table, baseline, oom, time.Now)
	if err != nil {
		return err
	}
	return s.serve(listener)
}

// newTable applies the limits, and takes the signals, before the first command can end.
func newTable(cfg config) (*proc.Table, error) {
	if err := cfg.Limits.apply(); err != nil {
		return nil, err
	}
	table := proc.NewTable()
	ended := takeSignals()
	go func() {
		for range ended {
			table.Reap()
		}
	}()
	return table, nil
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
