package pod

import (
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"syscall"
	"unsafe"
)

const (
	// keeperID is the user and group of the keeper: the last of the 65,536 that a container has at least, and the only
	// one that sandboxes do not have.
	keeperID = 65535

	prSetDumpable      = 4
	prSetKeepCaps      = 8
	capabilityVersion3 = 0x20080522
)

// capabilities are one set of the kernel's, and the three of a process.
type capabilities uint64

type capSets struct {
	effective, permitted, inheritable capabilities
}

func readCaps() (sets capSets, err error) {
	header := [2]uint32{capabilityVersion3, 0}
	var data [2][3]uint32
	_, _, errno := syscall.RawSyscall(syscall.SYS_CAPGET, uintptr(unsafe.Pointer(&header)), uintptr(unsafe.Pointer(&data)), 0)
	if errno != 0 {
		return sets, fmt.Errorf("capget: %w", errno)
	}
	join := func(i int) capabilities { return capabilities(data[0][i]) | capabilities(data[1][i])<<32 }
	return capSets{join(0), join(1), join(2)}, nil
}

// set is for every thread.
func (c capSets) set() error {
	header := &[2]uint32{capabilityVersion3, 0}
	data := new([2][3]uint32)
	for i, set := range []capabilities{c.effective, c.permitted, c.inheritable} {
		data[0][i], data[1][i] = uint32(set), uint32(set>>32)
	}
	_, _, errno := syscall.AllThreadsSyscall(syscall.SYS_CAPSET, uintptr(unsafe.Pointer(header)), uintptr(unsafe.Pointer(data)), 0)
	if errno != 0 {
		return fmt.Errorf("capset: %w", errno)
	}
	return nil
}

func prctl(option, value uintptr) error {
	if _, _, errno := syscall.AllThreadsSyscall(syscall.SYS_PRCTL, option, value, 0); errno != 0 {
		return fmt.Errorf("prctl: %d: %w", option, errno)
	}
	return nil
}

// becomeKeeper changes the user for good, with the capabilities that it has. Its memory is guarded by the user, so it
// is to own its entry in /proc: the kernel gives that of a process that is not dumpable to root, whom sandboxes have.
func becomeKeeper() error {
	if os.Geteuid() != 0 {
		return fmt.Errorf("the daemon's user is %d: it must be root", os.Geteuid())
	}
	closeProjects() // sandboxes may be in this user namespace
	if err := prctl(prSetKeepCaps, 1); err != nil {
		return err
	}
	before, err := readCaps()
	if err != nil {
		return err
	}
	if err := errors.Join(syscall.Setgroups(nil), syscall.Setresgid(keeperID, keeperID, keeperID),
		syscall.Setresuid(keeperID, keeperID, keeperID)); err != nil {
		return fmt.Errorf("cannot become user %d: %w: it needs the capabilities SETUID and SETGID", keeperID, err)
	}
	if err := (capSets{effective: before.permitted, permitted: before.permitted}).set(); err != nil {
		return err
	}
	return prctl(prSetDumpable, 1)
}

// closeProjects takes the one chance to map ids of projects, which every process of a user namespace has once for all
// of it, whatever its rights: it would be a message to all later ones. Where the namespace above maps none, nobody can.
func closeProjects() {
	_ = os.WriteFile("/proc/self/projid_map", []byte("0 0 1\n"), 0)
}

// idRange is a line of /proc/self/uid_map.
type idRange struct{ first, count int }

func readIDs(path string) ([]idRange, error) {
	content, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	var all []idRange
	for line := range strings.Lines(string(content)) {
		columns := strings.Fields(line)
		if len(columns) != 3 {
			return nil, fmt.Errorf("%s: %q has no three columns", path, line)
		}
		first, err := strconv.Atoi(columns[0])
		count, countErr := strconv.Atoi(columns[2])
		if err := errors.Join(err, countErr); err != nil {
			return nil, fmt.Errorf("%s: %w", path, err)
		}
		all = append(all, idRange{first, count})
	}
	return all, nil
}

// without maps each id to itself, but for one.
func without(hole int, ids []idRange) (mapped []syscall.SysProcIDMap) {
	add := func(first, end int) {
		if first < end {
			mapped = append(mapped, syscall.SysProcIDMap{ContainerID: first, HostID: first, Size: end - first})
		}
	}
	for _, r := range ids {
		end := r.first + r.count
		add(r.first, min(end, hole))
		add(max(r.first, hole+1), end)
	}
	return mapped
}
