package pristine

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"syscall"
	"unsafe"
)

const ipcRemove = 0 // IPC_RMID

// ipcKinds are the three SysV kinds: their table, and the call that removes one by its id.
var ipcKinds = [...]struct {
	table  string
	remove func(id uintptr) syscall.Errno
}{
	{"/proc/sysvipc/shm", func(id uintptr) syscall.Errno { return control(syscall.SYS_SHMCTL, id, ipcRemove, 0) }},
	{"/proc/sysvipc/msg", func(id uintptr) syscall.Errno { return control(syscall.SYS_MSGCTL, id, ipcRemove, 0) }},
	{"/proc/sysvipc/sem", func(id uintptr) syscall.Errno { return control(syscall.SYS_SEMCTL, id, 0, ipcRemove) }},
}

func control(call, id, a, b uintptr) syscall.Errno {
	_, _, errno := syscall.RawSyscall6(call, id, a, b, 0, 0, 0)
	return errno
}

// seesQueues refuses where commands can make message queues that nobody here sees: that needs no mount.
func seesQueues(mounts []mount) error {
	for _, m := range mounts {
		if m.place == queues && m.kind == "mqueue" {
			return nil
		}
	}
	name := []byte("agentfly-none\x00")
	_, _, errno := syscall.Syscall(syscall.SYS_MQ_UNLINK, uintptr(unsafe.Pointer(&name[0])), 0, 0)
	if errno == syscall.ENOSYS || errno == syscall.EPERM { // there are none, or nobody may make one
		return nil
	}
	return fmt.Errorf("%s: is no mount of the file system mqueue, and message queues would outlive a lease unseen: mount it there", queues)
}

// listIPC returns the ids in one table: its second column, below a line of titles.
func listIPC(table string) ([]uintptr, error) {
	file, err := os.Open(table)
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil // a kernel without SysV IPC
	}
	if err != nil {
		return nil, err
	}
	defer file.Close()
	var ids []uintptr
	lines := bufio.NewScanner(file)
	for lines.Scan() {
		columns := strings.Fields(lines.Text())
		if len(columns) < 2 || columns[0] == "key" {
			continue
		}
		id, err := strconv.Atoi(columns[1])
		if err != nil {
			return nil, fmt.Errorf("%s: %w", table, err)
		}
		ids = append(ids, uintptr(id))
	}
	return ids, lines.Err()
}

func removeIPC() error {
	for _, kind := range ipcKinds {
		ids, err := listIPC(kind.table)
		if err != nil {
			return err
		}
		for _, id := range ids {
			if errno := kind.remove(id); errno != 0 {
				return fmt.Errorf("ipc: %s: id %d: %w", kind.table, id, errno)
			}
		}
	}
	return nil
}

func verifyIPC() error {
	for _, kind := range ipcKinds {
		ids, err := listIPC(kind.table)
		if err != nil {
			return err
		}
		if len(ids) > 0 {
			return fmt.Errorf("ipc: %s has %d entries", kind.table, len(ids))
		}
	}
	return nil
}
