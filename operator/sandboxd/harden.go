package main

import (
	"fmt"
	"io"
	"os"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"unsafe"
)

// sysMemfdCreate is missing in the package syscall on some architectures.
var sysMemfdCreate = map[string]uintptr{"amd64": 319, "arm64": 279}[runtime.GOARCH]

const (
	prSetDumpable = 4
	rlimitNproc   = 6
	// signalSetBytes is the size of the kernel's signal set.
	signalSetBytes = 8
	// spareThreads are started at once: at its limit of processes the kernel refuses a new thread,
	// and a Go program that cannot get one dies.
	spareThreads = 8
)

// limits are set with setrlimit, for owners without a cgroup. Zero means none.
type limits struct {
	Processes uint64 `json:"processes"` // of the whole sandbox
	DataBytes uint64 `json:"dataBytes"` // of one process
}

func (l limits) apply() error {
	for resource, value := range map[int]uint64{rlimitNproc: l.Processes, syscall.RLIMIT_DATA: l.DataBytes} {
		if value == 0 {
			continue
		}
		if err := syscall.Setrlimit(resource, &syscall.Rlimit{Cur: value, Max: value}); err != nil {
			return fmt.Errorf("limits: resource %d: %d: %w", resource, value, err)
		}
	}
	return nil
}

// hide closes what commands of the same user could reach: memory and descriptors through /proc
// (a process that is not dumpable has none to show), the environment, inherited descriptors.
func hide(keep ...int) error {
	if _, _, errno := syscall.RawSyscall(syscall.SYS_PRCTL, prSetDumpable, 0, 0); errno != 0 {
		return fmt.Errorf("prctl: PR_SET_DUMPABLE: %w", errno)
	}
	os.Clearenv()
	names, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		return err
	}
	for _, name := range names {
		fd, err := strconv.Atoi(name.Name())
		if err != nil || fd <= 2 {
			continue
		}
		closeInherited(fd, keep)
	}
	return nil
}

// closeInherited tells the runtime's own descriptors from inherited ones by close-on-exec, which
// the runtime always sets and an inherited one cannot have.
func closeInherited(fd int, keep []int) {
	flags, _, errno := syscall.RawSyscall(syscall.SYS_FCNTL, uintptr(fd), syscall.F_GETFD, 0)
	if errno != 0 || flags&syscall.FD_CLOEXEC != 0 {
		return
	}
	for _, wanted := range keep {
		if fd == wanted {
			syscall.CloseOnExec(fd)
			return
		}
	}
	syscall.Close(fd)
}

// primeThreads makes the runtime own n idle threads, which it keeps.
func primeThreads(n int) {
	runtime.GOMAXPROCS(1) // requests are short; more would only be more threads, which wake each other
	var ready, done sync.WaitGroup
	release := make(chan struct{})
	ready.Add(n)
	done.Add(n)
	for range n {
		go func() {
			defer done.Done()
			runtime.LockOSThread()
			defer runtime.UnlockOSThread()
			ready.Done()
			<-release
		}()
	}
	ready.Wait()
	close(release)
	done.Wait()
}

// dropFaults gives the signals of a program's own faults back to the kernel. Go's handlers take one that
// a command sent with sigqueue or F_SETSIG for a real fault, and crash; the first process of a namespace
// is spared every signal without a handler that comes from inside. A real fault still ends it.
func dropFaults() error {
	var byDefault struct { // the kernel's struct sigaction, larger than on any architecture
		handler, flags, restorer uintptr
		mask                     [2]uint64
	}
	for _, signal := range []syscall.Signal{syscall.SIGILL, syscall.SIGTRAP, syscall.SIGBUS, syscall.SIGFPE,
		syscall.SIGSEGV, syscall.SIGSTKFLT, syscall.SIGSYS} {
		_, _, errno := syscall.RawSyscall6(syscall.SYS_RT_SIGACTION, uintptr(signal),
			uintptr(unsafe.Pointer(&byDefault)), 0, signalSetBytes, 0, 0)
		if errno != 0 {
			return fmt.Errorf("sigaction: %v: %w", signal, errno)
		}
	}
	return nil
}

// counter reads how often the kernel killed a process of this cgroup for memory. The file is
// memory.oom_control (v1) or memory.events (v2); both have a line "oom_kill N".
type counter struct{ file *os.File }

func openCounter(fd int) counter {
	if fd < 0 {
		return counter{}
	}
	return counter{os.NewFile(uintptr(fd), "oom")}
}

func (c counter) read() int {
	if c.file == nil {
		return 0
	}
	var content [1024]byte
	n, err := c.file.ReadAt(content[:], 0)
	if err != nil && err != io.EOF {
		return 0
	}
	for line := range strings.Lines(string(content[:n])) {
		if number, found := strings.CutPrefix(line, "oom_kill "); found {
			n, _ := strconv.Atoi(strings.TrimSpace(number))
			return n
		}
	}
	return 0
}
