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

// launch is a command made ready for the kernel: nothing may be allocated between fork and exec.
//
// The package syscall forks with CLONE_VFORK: the daemon's thread then waits in the kernel for the exec of a
// child that other commands may stop by a signal or hold up by a lease on its file, and with it waits the
// first garbage collection, and so the whole daemon. This fork does not wait.
type launch struct {
	path, dir *byte // dir is nil to stay
	argv, env []*byte
	files     [3]uintptr
	failure   uintptr // where the child writes its errno; closed by a successful exec
	limit     syscall.Rlimit
	user      *User
}

// action is the kernel's struct sigaction, larger than on any architecture; its zero is SIG_DFL.
type action struct {
	handler, flags, restorer uintptr
	mask                     [2]uint64
}

func prepare(path string, spec Spec, files [3]uintptr, failure uintptr) (*launch, error) {
	l := &launch{files: files, failure: failure, user: spec.User}
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

// fork starts the child. No signal may reach it while it still has the handlers of Go.
//
//go:norace
//go:nosplit
func (l *launch) fork() (pid int, errno syscall.Errno) {
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
	errno := l.exec()
	syscall.RawSyscall(syscall.SYS_WRITE, l.failure, uintptr(unsafe.Pointer(&errno)), unsafe.Sizeof(errno))
	for {
		syscall.RawSyscall(syscall.SYS_EXIT_GROUP, childFailed, 0, 0)
	}
}

//go:norace
//go:nosplit
func (l *launch) exec() syscall.Errno {
	for end := uintptr(0); end < 3; end++ { // the daemon's own three are open, so all sources lie above
		if _, _, errno := syscall.RawSyscall(syscall.SYS_DUP3, l.files[end], end, 0); errno != 0 {
			return errno
		}
	}
	// All of the daemon's descriptors close at an exec, but a child that is held up must not keep them.
	if l.failure > 3 {
		syscall.RawSyscall(sysCloseRange, 3, l.failure-1, 0)
	}
	syscall.RawSyscall(sysCloseRange, l.failure+1, highest, 0)
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

// spawn forks and returns at once, with a pipe that tells how the exec went: see outcome.
func spawn(path string, spec Spec, files [3]uintptr) (pid int, told *os.File, err error) {
	told, failure, err := os.Pipe()
	if err != nil {
		return 0, nil, err
	}
	defer failure.Close()
	l, err := prepare(path, spec, files, failure.Fd())
	if err != nil {
		told.Close()
		return 0, nil, err
	}
	runtime.LockOSThread()
	pid, errno := l.fork()
	runtime.UnlockOSThread()
	runtime.KeepAlive(l)
	if errno != 0 {
		told.Close()
		return 0, nil, errno
	}
	// The child does the same: whoever comes first, its group is there before anybody is to kill it.
	_ = syscall.Setpgid(pid, pid)
	return pid, told, nil
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
