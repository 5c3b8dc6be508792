package pod

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"syscall"
	"unsafe"
)

const (
	setMask     = 2 // SIG_SETMASK
	signals     = 64
	signalBytes = 8 // of the kernel's set of them
	emptyPath   = 0x1000
	aside       = 64 // descriptors from here are no target of a copy
	handed      = 5  // descriptors of every process of ours: see ListenerFD
	maxSpaces   = 8
	lostProcess = 1
)

// numbers of calls that the package syscall does not have.
var sysSetns, sysExecveat = map[string]uintptr{"amd64": 308, "arm64": 268}[runtime.GOARCH],
	map[string]uintptr{"amd64": 322, "arm64": 281}[runtime.GOARCH]

// steps of a launch, by what they need.
const (
	noStep uint32 = iota
	stepEnter
	stepMake
	stepProcess
	stepUser
	stepFiles
	stepExec
)

var stepNames = map[uint32]string{stepEnter: "setns", stepMake: "new namespaces", stepProcess: "a process namespace",
	stepUser: "the user", stepFiles: "descriptors", stepExec: "exec"}

// outcome is in memory that a child shares, unlike everything else.
type outcome struct {
	step  uint32
	errno uint32
	pid   int32 // of the process in a new process namespace
}

// launch is a process of this program in namespaces that exist, made ready for the kernel. A user namespace can only
// be entered by a process with one thread, which a program in Go has between fork and exec alone: nothing may be
// allocated there. The child has a copy of our memory, since the kernel takes what it shares for a stranger's when its
// user changes.
type launch struct {
	spaces   [maxSpaces]uintptr // the user namespace comes first: it gives the right to enter the others
	count    int
	made     uintptr // flags of namespaces that are made anew
	process  bool    // it is the first one of a new process namespace
	program  uintptr
	argv     []*byte
	env      [1]*byte
	files    [handed]uintptr
	outcome  *outcome
	defaults [4]uint64 // the kernel's struct sigaction, larger than on any architecture: SIG_DFL
}

// shared is memory for one launch at a time.
func shared() (*outcome, error) {
	page, err := syscall.Mmap(-1, 0, os.Getpagesize(), syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_SHARED|syscall.MAP_ANON)
	if err != nil {
		return nil, os.NewSyscallError("mmap", err)
	}
	return (*outcome)(unsafe.Pointer(unsafe.SliceData(page))), nil
}

func (o *outcome) unmap() {
	_ = syscall.Munmap(unsafe.Slice((*byte)(unsafe.Pointer(o)), os.Getpagesize()))
}

// run returns the new process, which is a child of ours, before its exec.
func (l *launch) run() (pid int, err error) {
	*l.outcome = outcome{}
	runtime.LockOSThread()
	id, errno := l.fork()
	runtime.UnlockOSThread()
	runtime.KeepAlive(l)
	if errno != 0 {
		return 0, os.NewSyscallError("fork", errno)
	}
	if !l.process {
		return id, nil
	}
	for { // the one between makes the other, and ends; who reaps all may have been quicker
		if _, err := syscall.Wait4(id, nil, 0, nil); !errors.Is(err, syscall.EINTR) {
			break
		}
	}
	if l.outcome.pid == 0 {
		return 0, failed(l.outcome)
	}
	return int(l.outcome.pid), nil
}

// failed says what the last launched process did not come over; nil if it came to its exec.
func failed(o *outcome) error {
	if o.step != noStep {
		return fmt.Errorf("%s: %w", stepNames[o.step], syscall.Errno(o.errno))
	}
	return nil
}

//go:norace
//go:nosplit
func (l *launch) fork() (int, syscall.Errno) {
	all, before := ^uint64(0), uint64(0)
	syscall.RawSyscall6(syscall.SYS_RT_SIGPROCMASK, setMask, uintptr(unsafe.Pointer(&all)),
		uintptr(unsafe.Pointer(&before)), signalBytes, 0, 0)
	id, _, errno := syscall.RawSyscall6(syscall.SYS_CLONE, uintptr(syscall.SIGCHLD), 0, 0, 0, 0, 0)
	if errno == 0 && id == 0 {
		l.child(&before)
	}
	syscall.RawSyscall6(syscall.SYS_RT_SIGPROCMASK, setMask, uintptr(unsafe.Pointer(&before)), 0, signalBytes, 0, 0)
	return int(id), errno
}

// child never returns. No signal may reach it while it has the handlers of Go.
//
//go:norace
//go:nosplit
func (l *launch) child(mask *uint64) {
	for signal := uintptr(1); signal <= signals; signal++ {
		syscall.RawSyscall6(syscall.SYS_RT_SIGACTION, signal, uintptr(unsafe.Pointer(&l.defaults)), 0, signalBytes, 0, 0)
	}
	syscall.RawSyscall6(syscall.SYS_RT_SIGPROCMASK, setMask, uintptr(unsafe.Pointer(mask)), 0, signalBytes, 0, 0)
	step, errno := l.enter()
	l.outcome.errno, l.outcome.step = uint32(errno), step
	for {
		syscall.RawSyscall(syscall.SYS_EXIT_GROUP, lostProcess, 0, 0)
	}
}

//go:norace
//go:nosplit
func (l *launch) enter() (step uint32, errno syscall.Errno) {
	for i := range l.count {
		if _, _, errno = syscall.RawSyscall(sysSetns, l.spaces[i], 0, 0); errno != 0 {
			return stepEnter, errno
		}
	}
	if _, _, errno = syscall.RawSyscall(syscall.SYS_UNSHARE, l.made, 0, 0); errno != 0 {
		return stepMake, errno
	}
	if l.process {
		if errno = l.between(); errno != 0 {
			return stepProcess, errno
		}
	}
	if _, _, errno = syscall.RawSyscall(syscall.SYS_SETGROUPS, 0, 0, 0); errno != 0 {
		return stepUser, errno
	}
	if _, _, errno = syscall.RawSyscall(syscall.SYS_SETRESGID, 0, 0, 0); errno != 0 {
		return stepUser, errno
	}
	if _, _, errno = syscall.RawSyscall(syscall.SYS_SETRESUID, 0, 0, 0); errno != 0 {
		return stepUser, errno
	}
	// Processes of one session share a scheduling group, whose priority any of them may change.
	if _, _, errno = syscall.RawSyscall(syscall.SYS_SETSID, 0, 0, 0); errno != 0 {
		return stepUser, errno
	}
	for i := range l.files {
		copied, _, errno := syscall.RawSyscall(syscall.SYS_FCNTL, l.files[i], syscall.F_DUPFD_CLOEXEC, aside)
		if errno != 0 {
			return stepFiles, errno
		}
		l.files[i] = copied
	}
	for i := range l.files {
		if _, _, errno = syscall.RawSyscall(syscall.SYS_DUP3, l.files[i], uintptr(i), 0); errno != 0 {
			return stepFiles, errno
		}
	}
	_, _, errno = syscall.RawSyscall6(sysExecveat, l.program, uintptr(unsafe.Pointer(&nothing)),
		uintptr(unsafe.Pointer(unsafe.SliceData(l.argv))), uintptr(unsafe.Pointer(&l.env)), emptyPath, 0)
	return stepExec, errno
}

var nothing byte // an empty path

// between starts the first process of a new process namespace, as a child of our own parent, and ends.
//
//go:norace
//go:nosplit
func (l *launch) between() syscall.Errno {
	if _, _, errno := syscall.RawSyscall(syscall.SYS_UNSHARE, syscall.CLONE_NEWPID, 0, 0); errno != 0 {
		return errno
	}
	id, _, errno := syscall.RawSyscall6(syscall.SYS_CLONE, uintptr(syscall.SIGCHLD)|syscall.CLONE_PARENT|syscall.CLONE_PARENT_SETTID, 0,
		uintptr(unsafe.Pointer(&l.outcome.pid)), 0, 0, 0)
	if errno != 0 {
		return errno
	}
	for id != 0 {
		syscall.RawSyscall(syscall.SYS_EXIT_GROUP, 0, 0, 0)
	}
	return 0
}
