package proc

import (
	"fmt"
	"io"
	"os"
	"runtime"
	"syscall"
	"unsafe"
)

const (
	setMask       = 2   // SIG_SETMASK
	signals       = 64  // of the kernel
	signalBytes   = 8   // of its set of them
	sysCloseRange = 436 // on every architecture
	highest       = ^uintptr(0) >> 32
	childFailed   = 253
	openFiles     = 1024 // the customary soft limit; Go raises its own to the hard one
)

// victimScore makes the kernel's out-of-memory killer choose a command before the daemon.
var (
	oomPath     = []byte("/proc/self/oom_score_adj\x00")
	victimScore = []byte("500")
)

// launch is a command made ready for the kernel: nothing may be allocated between fork and exec.
type launch struct {
	path, dir *byte // dir is nil to stay
	argv, env []*byte
	files     [3]int
	limit     syscall.Rlimit
	user      *User
	killed    uint32 // not 0: before its process was there to be killed; written atomically

	// How the child tells that the exec failed: a pipe, which a successful exec closes, or where it shares our
	// memory, in it.
	failurePipe uintptr
	errno       syscall.Errno
	score       bool // it is to make itself a victim, see victimScore,
	victim      bool // and has
}

// action is the kernel's struct sigaction, larger than on any architecture; its zero is SIG_DFL.
type action struct {
	handler, flags, restorer uintptr
	mask                     [2]uint64
}

func prepare(path string, spec Spec, files [3]int) (*launch, error) {
	l := &launch{files: files, user: spec.User}
	var err error
	if l.path, err = syscall.BytePtrFromString(path); err != nil {
		return nil, err
	}
	if spec.Dir != "" {
		if l.dir, err = syscall.BytePtrFromString(spec.Dir); err != nil {
			return nil, err
		}
	}
	if l.argv, err = syscall.SlicePtrFromStrings(spec.Argv); err != nil {
		return nil, err
	}
	if l.env, err = syscall.SlicePtrFromStrings(spec.Env); err != nil {
		return nil, err
	}
	if err = syscall.Getrlimit(syscall.RLIMIT_NOFILE, &l.limit); err != nil {
		return nil, err
	}
	l.limit.Cur = min(openFiles, l.limit.Max)
	return l, nil
}

// fork starts a child with memory of its own. It does not wait for the exec, but copying the tables of that
// memory takes as long as the exec itself. No signal may reach a child that still has the handlers of Go.
//
//go:norace
//go:nosplit
func (l *launch) fork(pid *int32) (errno syscall.Errno) {
	all, before := ^uint64(0), uint64(0)
	syscall.RawSyscall6(syscall.SYS_RT_SIGPROCMASK, setMask, uintptr(unsafe.Pointer(&all)),
		uintptr(unsafe.Pointer(&before)), signalBytes, 0, 0)
	id, _, errno := syscall.RawSyscall6(syscall.SYS_CLONE, uintptr(syscall.SIGCHLD)|syscall.CLONE_PARENT_SETTID, 0,
		uintptr(unsafe.Pointer(pid)), 0, 0, 0)
	if errno == 0 && id == 0 {
		l.child(&before)
	}
	syscall.RawSyscall6(syscall.SYS_RT_SIGPROCMASK, setMask, uintptr(unsafe.Pointer(&before)), 0, signalBytes, 0, 0)
	return errno
}

// child runs in the new process and never returns.
//
//go:norace
//go:nosplit
func (l *launch) child(mask *uint64) {
	var byDefault action
	for signal := uintptr(1); signal <= signals; signal++ {
		syscall.RawSyscall6(syscall.SYS_RT_SIGACTION, signal, uintptr(unsafe.Pointer(&byDefault)), 0, signalBytes, 0, 0)
	}
	syscall.RawSyscall6(syscall.SYS_RT_SIGPROCMASK, setMask, uintptr(unsafe.Pointer(mask)), 0, signalBytes, 0, 0)
	syscall.RawSyscall(syscall.SYS_SETPGID, 0, 0, 0)
	if l.killed != 0 {
		pid, _, _ := syscall.RawSyscall(syscall.SYS_GETPID, 0, 0, 0)
		syscall.RawSyscall(syscall.SYS_KILL, pid, uintptr(syscall.SIGKILL), 0)
	}
	if l.score {
		l.becomeVictim()
	}
	l.errno = l.exec()
	if l.failurePipe != 0 {
		syscall.RawSyscall(syscall.SYS_WRITE, l.failurePipe, uintptr(unsafe.Pointer(&l.errno)), unsafe.Sizeof(l.errno))
	}
	for {
		syscall.RawSyscall(syscall.SYS_EXIT_GROUP, childFailed, 0, 0)
	}
}

//go:norace
//go:nosplit
func (l *launch) exec() syscall.Errno {
	for end := uintptr(0); end < 3; end++ { // the daemon's own three are open, so all sources lie above
		if _, _, errno := syscall.RawSyscall(syscall.SYS_DUP3, uintptr(l.files[end]), end, 0); errno != 0 {
			return errno
		}
	}
	// All of the daemon's descriptors close at an exec, but a child that is held up must not keep them.
	if l.failurePipe > 3 {
		syscall.RawSyscall(sysCloseRange, 3, l.failurePipe-1, 0)
	}
	syscall.RawSyscall(sysCloseRange, max(3, l.failurePipe+1), highest, 0)
	_, _, errno := syscall.RawSyscall6(syscall.SYS_PRLIMIT64, 0, syscall.RLIMIT_NOFILE, uintptr(unsafe.Pointer(&l.limit)), 0, 0, 0)
	if errno != 0 {
		return errno
	}
	if errno = l.become(); errno != 0 {
		return errno
	}
	if l.dir != nil {
		if _, _, errno = syscall.RawSyscall(syscall.SYS_CHDIR, uintptr(unsafe.Pointer(l.dir)), 0, 0); errno != 0 {
			return errno
		}
	}
	_, _, errno = syscall.RawSyscall(syscall.SYS_EXECVE, uintptr(unsafe.Pointer(l.path)),
		uintptr(unsafe.Pointer(unsafe.SliceData(l.argv))), uintptr(unsafe.Pointer(unsafe.SliceData(l.env))))
	return errno
}

// become changes the user; each call is of one thread, and a child has one.
//
//go:norace
//go:nosplit
func (l *launch) become() (errno syscall.Errno) {
	if l.user == nil {
		return 0
	}
	_, _, errno = syscall.RawSyscall(syscall.SYS_SETGROUPS, uintptr(len(l.user.Groups)),
		uintptr(unsafe.Pointer(unsafe.SliceData(l.user.Groups))), 0)
	if errno == 0 {
		_, _, errno = syscall.RawSyscall(syscall.SYS_SETGID, uintptr(l.user.GID), 0, 0)
	}
	if errno == 0 {
		_, _, errno = syscall.RawSyscall(syscall.SYS_SETUID, uintptr(l.user.UID), 0, 0)
	}
	return errno
}

// becomeVictim raises the child's own likelihood to be killed for memory, which is allowed to everybody.
//
//go:norace
//go:nosplit
func (l *launch) becomeVictim() {
	fd, _, errno := syscall.RawSyscall6(syscall.SYS_OPENAT, ^uintptr(99), uintptr(unsafe.Pointer(&oomPath[0])), // AT_FDCWD
		syscall.O_WRONLY|syscall.O_CLOEXEC, 0, 0, 0)
	if errno != 0 {
		return
	}
	_, _, errno = syscall.RawSyscall(syscall.SYS_WRITE, fd, uintptr(unsafe.Pointer(&victimScore[0])), uintptr(len(victimScore)))
	syscall.RawSyscall(syscall.SYS_CLOSE, fd, 0, 0)
	l.victim = errno == 0
}

// slow starts a child by fork, and returns a pipe that tells how the exec went: see outcome.
func (l *launch) slow(pid *int32) (told *os.File, err error) {
	told, failure, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	defer failure.Close()
	l.failurePipe = failure.Fd()
	runtime.LockOSThread()
	errno := l.fork(pid)
	runtime.UnlockOSThread()
	runtime.KeepAlive(l)
	if errno != 0 {
		told.Close()
		return nil, errno
	}
	// The child does the same: whoever comes first, its group is there before anybody is to kill it.
	_ = syscall.Setpgid(int(*pid), int(*pid))
	return told, nil
}

// outcome waits for the exec: nil if the command runs, or ended before it could say.
func outcome(told *os.File) error {
	defer told.Close()
	var errno syscall.Errno
	buffer := (*[unsafe.Sizeof(errno)]byte)(unsafe.Pointer(&errno))
	n, err := io.ReadFull(told, buffer[:])
	if n == 0 {
		return nil
	}
	if err != nil {
		return fmt.Errorf("exec: %w", err)
	}
	return errno
}
