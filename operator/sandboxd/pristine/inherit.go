package pristine

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"runtime"
	"strconv"
	"syscall"
	"unsafe"
)

const (
	resources      = 16 // RLIM_NLIMITS
	ioprioThread   = 1  // IOPRIO_WHO_PROCESS, which means a thread
	schedAttrBytes = 56 // struct sched_attr, version 1
	affinityBytes  = 1024
)

// sysSchedGetattr is missing in the package syscall on some architectures.
var sysSchedGetattr = map[string]uintptr{"amd64": 315, "arm64": 275}[runtime.GOARCH]

// ownFiles are those of the daemon in /proc whose values a new process takes over.
var ownFiles = []string{"oom_score_adj", "coredump_filter", "autogroup"}

// inherited is what commands inherit from the daemon and what a command, of the same user, may change on
// the daemon from outside: limits by prlimit, files in /proc, the name of the host, and for each thread its
// scheduling.
type inherited struct {
	limits  [resources]syscall.Rlimit
	files   [3]string
	host    string
	threads thread
}

func readFiles() (files [3]string) {
	for i, name := range ownFiles {
		content, _ := os.ReadFile("/proc/self/" + name) // a kernel need not have it
		files[i] = string(content)
	}
	return files
}

func readHost() string {
	var names syscall.Utsname
	if err := syscall.Uname(&names); err != nil {
		return err.Error()
	}
	return fmt.Sprint(names.Nodename, names.Domainname)
}

type thread struct {
	scheduling [schedAttrBytes]byte
	affinity   [affinityBytes]byte
	ioPriority uintptr
}

func readLimits() (limits [resources]syscall.Rlimit, err error) {
	for resource := range limits {
		// The package syscall answers RLIMIT_NOFILE from memory; the kernel must be asked.
		_, _, errno := syscall.RawSyscall6(syscall.SYS_PRLIMIT64, 0, uintptr(resource), 0,
			uintptr(unsafe.Pointer(&limits[resource])), 0, 0)
		if errno != 0 {
			return limits, fmt.Errorf("limits: resource %d: %w", resource, errno)
		}
	}
	return limits, nil
}

func readThread(id uintptr) (t thread, errno syscall.Errno) {
	if sysSchedGetattr != 0 {
		_, _, errno = syscall.RawSyscall6(sysSchedGetattr, id, uintptr(unsafe.Pointer(&t.scheduling)), schedAttrBytes, 0, 0, 0)
		if errno != 0 {
			return t, errno
		}
		binary.NativeEndian.PutUint32(t.scheduling[:], 0) // the size that this kernel filled
	}
	_, _, errno = syscall.RawSyscall(syscall.SYS_SCHED_GETAFFINITY, id, affinityBytes, uintptr(unsafe.Pointer(&t.affinity)))
	if errno != 0 {
		return t, errno
	}
	t.ioPriority, _, errno = syscall.RawSyscall(syscall.SYS_IOPRIO_GET, ioprioThread, id, 0)
	return t, errno
}

func readInherited() (i inherited, err error) {
	if i.limits, err = readLimits(); err != nil {
		return i, err
	}
	i.files, i.host = readFiles(), readHost()
	var errno syscall.Errno
	if i.threads, errno = readThread(0); errno != 0 {
		return i, fmt.Errorf("scheduling: %w", errno)
	}
	return i, nil
}

// verify compares every thread: any of them may start the next command.
func (i inherited) verify() error {
	limits, err := readLimits()
	if err != nil {
		return err
	}
	for resource := range limits {
		if limits[resource] != i.limits[resource] {
			return fmt.Errorf("limits: resource %d of the daemon was changed", resource)
		}
	}
	for number, now := range readFiles() {
		if now != i.files[number] {
			return fmt.Errorf("inherited: %s of the daemon was changed", ownFiles[number])
		}
	}
	if readHost() != i.host {
		return errors.New("inherited: the name of the host was changed")
	}
	ids, err := os.ReadDir("/proc/self/task")
	if err != nil {
		return err
	}
	for _, entry := range ids {
		id, err := strconv.Atoi(entry.Name())
		if err != nil {
			return err
		}
		now, errno := readThread(uintptr(id))
		switch {
		case errno == syscall.ESRCH: // it has ended
		case errno != 0:
			return fmt.Errorf("scheduling: thread %d: %w", id, errno)
		case now != i.threads:
			return fmt.Errorf("scheduling: priority or processors of the daemon were changed")
		}
	}
	return nil
}
