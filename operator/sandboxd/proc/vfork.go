package proc

import (
	"runtime"
	"syscall"
	"unsafe" // also for linkname
)

// quickStarts bounds the threads that wait for an exec. A command may be held up there: by a signal that stops
// it, by a lease on its file. Whoever comes when all are taken is forked.
const quickStarts = 4

// The runtime must know that a thread waits in the kernel: it would wait for that thread at the next garbage
// collection, and so would the whole daemon. The package syscall does not tell it.
//
//go:linkname entersyscall runtime.entersyscall
//go:noescape
func entersyscall()

//go:linkname exitsyscall runtime.exitsyscall
//go:noescape
func exitsyscall()

//go:noescape
func rawVfork(flags, pid uintptr) (id, errno uintptr)

// quick starts a child that shares our memory until its exec, and returns after that. The kernel writes the pid
// before the child runs.
//
// The child cannot be chosen for its share of our memory when memory ends, nor does its score become ours: the
// kernel knows what a vfork is.
func (l *launch) quick(pid *int32) error {
	runtime.LockOSThread()
	errno := l.vfork(pid)
	runtime.UnlockOSThread()
	runtime.KeepAlive(l)
	if errno != 0 {
		return errno
	}
	return nil
}

//go:norace
//go:nosplit
func (l *launch) vfork(pid *int32) syscall.Errno {
	all, before := ^uint64(0), uint64(0)
	syscall.RawSyscall6(syscall.SYS_RT_SIGPROCMASK, setMask, uintptr(unsafe.Pointer(&all)),
		uintptr(unsafe.Pointer(&before)), signalBytes, 0, 0)
	entersyscall()
	id, errno := rawVfork(uintptr(syscall.SIGCHLD)|syscall.CLONE_VM|syscall.CLONE_VFORK|syscall.CLONE_PARENT_SETTID,
		uintptr(unsafe.Pointer(pid)))
	if errno == 0 && id == 0 {
		l.child(&before)
	}
	syscall.RawSyscall6(syscall.SYS_RT_SIGPROCMASK, setMask, uintptr(unsafe.Pointer(&before)), 0, signalBytes, 0, 0)
	exitsyscall()
	return syscall.Errno(errno)
}
