package pristine

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"unsafe"
)

// Operations of keyctl, and the keyrings that outlive a process.
const (
	keyDescribe, keyUnlink, keyRead, keyPersistent = 6, 9, 11, 22

	sessionRing, userRing, userSessionRing = -3, -4, -5

	maxKeys = 1024 // more than the kernel gives a user
)

// sysKeyctl is 0 where its number is not known: then nobody here looks into keyrings.
var sysKeyctl = map[string]uintptr{"amd64": 250, "arm64": 219}[runtime.GOARCH]

// keyrings hold keys, which any process may add, under the user and not under a file or a process. They are
// nil where system calls on keys are refused, as most container engines do.
type keyrings struct {
	own   bool // the user namespace is the sandbox's: nobody outside uses its rings
	rings map[int]ring
}

type ring struct {
	keys     []uint32
	describe string // type, owner, permissions, name
}

func openKeyrings() (*keyrings, error) {
	if sysKeyctl == 0 {
		return nil, nil
	}
	user := userRing
	if _, errno := keyctl(keyRead, uintptr(user), 0, 0); errno == syscall.EPERM || errno == syscall.ENOSYS {
		return nil, nil
	}
	ids, err := os.ReadFile("/proc/self/uid_map")
	if err != nil {
		return nil, err
	}
	fields := strings.Fields(string(ids))
	k := &keyrings{own: !slices.Equal(fields, []string{"0", "0", "4294967295"}), rings: map[int]ring{}}
	for _, id := range []int{userRing, userSessionRing, sessionRing} {
		if k.rings[id], err = readRing(id); err != nil {
			return nil, err
		}
	}
	return k, nil
}

func keyctl(operation int, a, b, c uintptr) (int, syscall.Errno) {
	n, _, errno := syscall.Syscall6(sysKeyctl, uintptr(operation), a, b, c, 0, 0)
	return int(n), errno
}

func readRing(id int) (r ring, err error) {
	var content [4 * maxKeys]byte
	n, errno := keyctl(keyRead, uintptr(id), uintptr(unsafe.Pointer(&content)), uintptr(len(content)))
	if errno == syscall.ENOKEY {
		return r, nil // no session has been made
	}
	if errno != 0 || n > len(content) {
		return r, fmt.Errorf("keyrings: %d: cannot be read: %w", id, errno)
	}
	for at := 0; at+4 <= n; at += 4 {
		r.keys = append(r.keys, binary.NativeEndian.Uint32(content[at:]))
	}
	slices.Sort(r.keys)
	var words [256]byte
	if n, errno = keyctl(keyDescribe, uintptr(id), uintptr(unsafe.Pointer(&words)), uintptr(len(words))); errno == 0 {
		r.describe = string(words[:min(n, len(words))])
	}
	return r, nil
}

// restore takes the keys out that were added, where nobody else can have added them.
func (k *keyrings) restore() error {
	if k == nil || !k.own {
		return nil
	}
	for id, was := range k.rings {
		now, err := readRing(id)
		if err != nil {
			return err
		}
		unlinkNew(id, now.keys, was.keys)
	}
	return k.emptyPersistent()
}

func unlinkNew(id int, now, was []uint32) {
	for _, key := range now {
		if !slices.Contains(was, key) {
			_, _ = keyctl(keyUnlink, uintptr(key), uintptr(id), 0) // what stays is found
		}
	}
}

// emptyPersistent empties the ring that outlives even a user's last process. Getting it links it into another.
func (k *keyrings) emptyPersistent() error {
	mine, into := -1, userRing
	persistent, errno := keyctl(keyPersistent, uintptr(mine), uintptr(into), 0)
	if errno == syscall.EOPNOTSUPP || errno == syscall.EINVAL {
		return nil // a kernel without
	}
	if errno != 0 {
		return fmt.Errorf("keyrings: the persistent one: %w", errno)
	}
	defer keyctl(keyUnlink, uintptr(persistent), uintptr(into), 0)
	now, err := readRing(persistent)
	if err != nil {
		return err
	}
	unlinkNew(persistent, now.keys, nil)
	if now, err = readRing(persistent); err == nil && len(now.keys) > 0 {
		err = errors.New("keyrings: the persistent one is not empty")
	}
	return err
}

func (k *keyrings) verify() error {
	if k == nil {
		return nil
	}
	for id, was := range k.rings {
		now, err := readRing(id)
		if err != nil {
			return err
		}
		if !slices.Equal(now.keys, was.keys) || now.describe != was.describe {
			return fmt.Errorf("keyrings: %d was changed", id)
		}
	}
	return nil
}
