package pod

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"syscall"
	"unsafe"
)

const (
	sealedMount = syscall.MS_NOSUID | syscall.MS_NODEV | syscall.MS_NOEXEC
	shmOptions  = "mode=1777,size=64m" // as every engine has it
)

// Terminals of the container are not for a sandbox.
var noDevices = []string{"console", "ptmx"}

var deviceLinks = [][2]string{{"/proc/self/fd", "fd"}, {"/proc/self/fd/0", "stdin"}, {"/proc/self/fd/1", "stdout"},
	{"/proc/self/fd/2", "stderr"}, {"pts/ptmx", "ptmx"}}

// Files of /proc that belong to the whole machine, as engines treat them: root may write to some of them, and a
// sandbox without a user namespace has root.
var (
	readOnlyProc = []string{"bus", "fs", "irq", "sys", "sysrq-trigger"}
	maskedProc   = []string{"asound", "acpi", "interrupts", "kcore", "keys", "latency_stats", "timer_list", "timer_stats",
		"sched_debug", "scsi"}
)

// makeDevices makes /dev: the container's devices, which a sandbox cannot change, and everything else its own.
func makeDevices(root string) error {
	dev := filepath.Join(root, "dev")
	if err := mount("dev", dev, "tmpfs", syscall.MS_NOSUID|syscall.MS_NOEXEC, "mode=0755,size=64k"); err != nil {
		return err
	}
	entries, err := os.ReadDir("/dev")
	if err != nil {
		return err
	}
	for _, entry := range entries {
		// The folder's own word for what an entry is knows nothing of a device that is mounted there.
		info, err := os.Lstat("/dev/" + entry.Name())
		if err != nil || info.Mode()&os.ModeCharDevice == 0 || slices.Contains(noDevices, entry.Name()) {
			continue
		}
		device := filepath.Join(dev, entry.Name())
		if err := os.WriteFile(device, nil, 0o600); err != nil {
			return err
		}
		if err := mountAgain("/dev/"+entry.Name(), device, 0); err != nil {
			return err
		}
		if err := readOnly(device, false); err != nil {
			return err
		}
	}
	for _, link := range deviceLinks {
		if err := os.Symlink(link[0], filepath.Join(dev, link[1])); err != nil {
			return err
		}
	}
	for _, folder := range []string{"pts", "shm", "mqueue"} {
		if err := os.Mkdir(filepath.Join(dev, folder), 0o755); err != nil {
			return err
		}
	}
	return errors.Join(
		mount("devpts", dev+"/pts", "devpts", syscall.MS_NOSUID|syscall.MS_NOEXEC, "newinstance,ptmxmode=0666,mode=0620"),
		mount("shm", dev+"/shm", "tmpfs", sealedMount, shmOptions),
		mount("mqueue", dev+"/mqueue", "mqueue", sealedMount, ""),
		settle(dev))
}

// settle gives what was just made the time of the container's own, which is the same in every sandbox.
func settle(dev string) error {
	var st syscall.Stat_t
	if err := syscall.Stat("/dev/null", &st); err != nil {
		return fmt.Errorf("/dev/null: %w", err)
	}
	for _, link := range deviceLinks {
		if err := setTimes(filepath.Join(dev, link[1]), st.Ctim, st.Ctim); err != nil {
			return err
		}
	}
	return setTimes(dev, st.Ctim, st.Ctim)
}

// makeProc mounts a /proc of this process's own process namespace.
func makeProc(place string) error {
	if err := mount("proc", place, "proc", sealedMount, ""); err != nil {
		return err
	}
	for _, name := range readOnlyProc {
		path := filepath.Join(place, name)
		if _, err := os.Lstat(path); err != nil {
			continue // this kernel has none
		}
		if err := errors.Join(mountAgain(path, path, syscall.MS_REC), readOnly(path, true)); err != nil {
			return err
		}
	}
	for _, name := range maskedProc {
		path := filepath.Join(place, name)
		info, err := os.Lstat(path)
		if err != nil {
			continue
		}
		if info.IsDir() {
			err = mount("tmpfs", path, "tmpfs", syscall.MS_RDONLY, "size=0,mode=0555")
		} else {
			err = mountAgain(filepath.Join(place, "../dev/null"), path, 0) // which cannot be changed
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// raiseLoopback makes the one device of a new network namespace usable.
func raiseLoopback() error {
	socket, err := syscall.Socket(syscall.AF_INET, syscall.SOCK_DGRAM|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("socket: %w", err)
	}
	defer syscall.Close(socket)
	var request struct { // the kernel's struct ifreq
		name  [16]byte
		flags uint16
		_     [22]byte
	}
	copy(request.name[:], "lo")
	request.flags = syscall.IFF_UP
	_, _, errno := syscall.Syscall(syscall.SYS_IOCTL, uintptr(socket), syscall.SIOCSIFFLAGS, uintptr(unsafe.Pointer(&request)))
	if errno != 0 {
		return fmt.Errorf("ownNetwork: the loopback device: %w: a container that mounts itself needs the capability NET_ADMIN", errno)
	}
	return nil
}
