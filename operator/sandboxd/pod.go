package main

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"os"
	"os/exec"
	"os/signal"
	"runtime"
	"runtime/debug"
	"strconv"
	"strings"
	"syscall"
	"time"
	"unsafe"

	"agentfly.dev/sandboxd/pod"
	"agentfly.dev/sandboxd/pristine"
	"agentfly.dev/sandboxd/proc"
)

const (
	configEnv      = "AGENTFLY_SANDBOXD"
	defaultAddress = "tcp://:7070"
	// clusterEnv is what Kubernetes tells every container; a sandbox has no use for it.
	clusterEnv = "KUBERNETES_"

	probeTime = time.Minute // it makes three sandboxes at most
	// Without a limit of memory there is nothing to take a share of.
	upperOfMemory, upperBytes = 0.75, 2 << 30
)

// again starts this program anew, without an environment: the first one would stay readable. The image's own goes to
// the commands, as does its folder to work in.
func again(listen string) error {
	given, found := os.LookupEnv(configEnv)
	if !found {
		return errors.New(configEnv + ": is not set: with --pod it is the configuration, in JSON")
	}
	cfg, err := parseConfig(given)
	if err != nil {
		return fmt.Errorf("%s: %w", configEnv, err)
	}
	env := imageEnv(os.Environ())
	maps.Copy(env, cfg.Env)
	cfg.Env = env
	if cfg.Workdir == "" {
		if cfg.Workdir, err = os.Getwd(); err != nil {
			return err
		}
	}
	line, err := json.Marshal(cfg)
	if err != nil {
		return err
	}
	if err := becomeStdin(append(line, '\n')); err != nil {
		return err
	}
	if listen == "" {
		listen = defaultAddress
	}
	return syscall.Exec("/proc/self/exe", []string{"sandboxd", "--pod", "--configured", "--listen", listen}, nil)
}

func imageEnv(environment []string) map[string]string {
	env := map[string]string{}
	for _, entry := range environment {
		name, value, _ := strings.Cut(entry, "=")
		if name != configEnv && name != "" && !strings.HasPrefix(name, clusterEnv) {
			env[name] = value
		}
	}
	return env
}

// becomeStdin puts content on standard input, in memory: a pipe may have room for less.
func becomeStdin(content []byte) error {
	name, err := syscall.BytePtrFromString("config")
	if err != nil {
		return err
	}
	fd, _, errno := syscall.Syscall(sysMemfdCreate, uintptr(unsafe.Pointer(name)), 0, 0)
	if errno != 0 {
		return fmt.Errorf("memfd_create: %w", errno)
	}
	file := os.NewFile(fd, "config")
	defer file.Close()
	if _, err := file.Write(content); err != nil {
		return err
	}
	if _, err := file.Seek(0, io.SeekStart); err != nil {
		return err
	}
	return syscall.Dup3(int(fd), 0, 0)
}

// runPod is the first process of a pod's container: a keeper of sandboxes where one can be made, else the daemon of
// the container as it is.
func runPod(listen string) error {
	if os.Getpid() != 1 {
		return errors.New("pid: must be 1, the first process of the container: make `sandboxd --pod` its command")
	}
	cfg, err := readConfig(bufio.NewReaderSize(os.Stdin, 2*maxConfigBytes))
	if err != nil {
		return err
	}
	null, err := os.Open(os.DevNull)
	if err != nil {
		return err
	}
	if err := errors.Join(syscall.Dup3(int(null.Fd()), 0, 0), null.Close()); err != nil {
		return err
	}
	if err := hide(); err != nil {
		return err
	}
	listener, _, err := openListener(-1, listen, "", -1)
	if err != nil {
		return err
	}
	findings, err := askProbe()
	if err != nil {
		return err
	}
	kind, refused, err := choose(cfg.Reset, findings)
	if err != nil {
		return err
	}
	cfg.Pod = &facts{Method: kind.Method, Refused: refused}
	if kind.Method == "" {
		cfg.OwnNetwork = false // other containers of the pod use it, and this one's requests do
		if cfg.Reset == nil {
			cfg.Reset = &pristine.Reset{}
		}
		return serveHere(cfg, listener, podCounter())
	}
	return keep(cfg, kind, listener)
}

// choose returns the kind of sandbox for what the owner wants, without a method where none is to be made.
func choose(wanted *pristine.Reset, findings []pod.Finding) (kind pod.Kind, refused map[string]string, err error) {
	method := "auto"
	if wanted != nil && wanted.Method != "" {
		method = wanted.Method
	}
	refused = map[string]string{}
	for _, found := range findings {
		if of := found.Method; !found.Works {
			refused[of] = strings.TrimPrefix(refused[of]+"; "+found.Why, "; ")
		}
	}
	for _, found := range findings {
		of := found.Method
		if !found.Works {
			continue
		}
		delete(refused, of) // one of its ways does
		if kind.Method == "" && (of == pod.Overlay || of == pod.OverlaySharedPID) && (method == of || method == "auto") {
			kind = found.Kind
		}
	}
	if why, is := refused[method]; is && kind.Method == "" {
		return kind, refused, fmt.Errorf("reset.method: %s does not work here: %s", method, why)
	}
	return kind, refused, nil
}

// keep makes this process the keeper of sandboxes. When no other can follow, it serves itself, and says why.
func keep(cfg config, kind pod.Kind, listener net.Listener) error {
	order := pod.Order{Kind: kind, UpperBytes: cfg.UpperBytes, OwnNetwork: cfg.OwnNetwork, Workdir: cfg.Workdir}
	if order.UpperBytes == 0 {
		order.UpperBytes = shareOfMemory()
	}
	program, err := os.Readlink("/proc/self/exe")
	if err != nil {
		return err
	}
	if order.Stage, err = pod.StageOf(program); err != nil {
		return err
	}
	line, err := json.Marshal(cfg)
	if err != nil {
		return err
	}
	shared, err := listener.(*net.TCPListener).File()
	if err != nil {
		return err
	}
	if err := pod.Become(); err != nil {
		return err
	}
	table := proc.NewTable()
	ended := takeSignals()
	go func() {
		for range ended {
			table.Reap()
		}
	}()
	table.Reap() // of what was tried
	endOnTerm()
	primeThreads(spareThreads)
	if err := dropFaults(); err != nil {
		return err
	}
	process, err := pristine.RecordProcess()
	if err != nil {
		return err
	}
	k := &pod.Keeper{Order: order, Configuration: line, Listener: shared, World: keeperWorld{table, process},
		Incarnation: max(cfg.Incarnation, 1)}
	if err := k.Start(); err != nil {
		return err
	}
	return condemned(cfg, table, listener, k.Run())
}

// endOnTerm lets the kubelet end the pod at once. No sandbox can signal its keeper.
func endOnTerm() {
	term := make(chan os.Signal, 1)
	signal.Notify(term, syscall.SIGTERM)
	go func() {
		<-term
		os.Exit(0)
	}()
}

type keeperWorld struct {
	*proc.Table
	process pristine.Process
}

func (w keeperWorld) Verify() error { return w.process.Verify() }

// condemned serves a sandbox that nobody may lease any more.
func condemned(cfg config, table *proc.Table, listener net.Listener, why error) error {
	s, err := newServer(cfg, table, replaced{cfg.Pod.Method}, counter{}, time.Now)
	if err != nil {
		return err
	}
	s.lease.Revoke()
	s.lease.Cleaned(why.Error())
	return s.serve(listener)
}

// replaced is the baseline where there is nothing to put back: a reset replaces the sandbox.
type replaced struct{ method string }

func (r replaced) Method() string { return r.method }
func (replaced) Restore() error   { return nil }
func (replaced) Verify() error    { return nil }

// runInner is the first process of a sandbox in a pod, or makes something for it.
func runInner(role string) error {
	// What waits for it is a reset: no other thread is to take turns with the one that works, nor to collect garbage.
	runtime.GOMAXPROCS(1)
	collect := debug.SetGCPercent(-1)
	stdin := bufio.NewReaderSize(os.Stdin, 2*maxConfigBytes)
	order, link, err := pod.Enter(role, stdin)
	if err != nil || link == nil {
		return err
	}
	serve, err := enter(order, link, stdin)
	if err != nil {
		_ = link.Fail(err)
		return err
	}
	debug.SetGCPercent(collect)
	return serve()
}

// enter prepares all that can be prepared before the sandbox is needed.
func enter(order pod.Order, link *pod.Link, stdin *bufio.Reader) (serve func() error, err error) {
	if err := hide(pod.ListenerFD); err != nil {
		return nil, err
	}
	if next, err := stdin.Peek(1); err != nil || next[0] == '\n' { // only to see whether it can be made
		return func() error { _, _ = link.Ready(); return nil }, nil
	}
	cfg, err := readConfig(stdin)
	if err != nil {
		return nil, err
	}
	table, err := newTable(cfg)
	if err != nil {
		return nil, err
	}
	if !order.OwnProcesses {
		if err := table.Kept(); err != nil {
			return nil, err
		}
	}
	listener, oom, err := openListener(pod.ListenerFD, "", "", -1)
	if err != nil {
		return nil, err
	}
	if file := podCounter(); file.file != nil {
		oom = file
	}
	primeThreads(spareThreads)
	if err := dropFaults(); err != nil {
		return nil, err
	}
	endWith(stdin)
	return func() error {
		if cfg.Incarnation, err = link.Ready(); err != nil {
			return err
		}
		s, err := newServer(cfg, table, replaced{order.Method}, oom, time.Now)
		if err != nil {
			return err
		}
		s.handOver = link.Replace
		return s.serve(listener)
	}, nil
}

// askProbe lets another process find out what works: it changes its user for that.
func askProbe() ([]pod.Finding, error) {
	asked := exec.Command("/proc/self/exe", "probe")
	asked.Env = []string{}
	var said bytes.Buffer
	asked.Stderr = &said
	late := time.AfterFunc(probeTime, func() { _ = asked.Process.Kill() })
	defer late.Stop()
	told, err := asked.Output()
	if err != nil {
		return nil, fmt.Errorf("probe: %w: %s", err, bytes.TrimSpace(said.Bytes()))
	}
	var findings []pod.Finding
	if err := json.Unmarshal(told, &findings); err != nil {
		return nil, fmt.Errorf("probe: %w", err)
	}
	return findings, nil
}

func probe(to io.Writer) error {
	encoder := json.NewEncoder(to)
	encoder.SetIndent("", "  ")
	encoder.SetEscapeHTML(false)
	return encoder.Encode(pod.Probe())
}

// podCounter is the container's own count of out-of-memory kills, of either version of cgroups.
func podCounter() counter {
	for _, path := range []string{"/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control"} {
		if file, err := os.Open(path); err == nil {
			return counter{file}
		}
	}
	return counter{}
}

// shareOfMemory leaves the rest of the container's memory for processes: the kernel cannot free files in memory by
// killing, so that it would come to the keeper.
func shareOfMemory() int64 {
	for _, path := range []string{"/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"} {
		content, err := os.ReadFile(path)
		if err != nil {
			continue
		}
		limit, err := strconv.ParseInt(strings.TrimSpace(string(content)), 10, 64)
		if err == nil && limit < 1<<62 { // v1 writes nearly the largest number for none
			return int64(float64(limit) * upperOfMemory)
		}
	}
	return upperBytes
}
