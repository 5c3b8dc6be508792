package pristine

import (
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"syscall"
	"time"
	"unsafe"
)

const (
	exchange = 2 // RENAME_EXCHANGE
	// storeMode lets nobody list a store: whoever does not know the names in it cannot reach the copies.
	storeMode   = 0o300
	storePrefix = ".agentfly-"
)

// sysRenameat2 is missing in the package syscall on some architectures.
var sysRenameat2 = map[string]uintptr{"amd64": 316, "arm64": 276}[runtime.GOARCH]

// swaps is the method paths: a spare copy of each declared folder is made while the lease runs, and takes
// the folder's place at the reset. It needs no privilege but to write to the folder above.
type swaps struct {
	folders []*swap
	ready   chan error // how the making of spares went; one value for each
	spent   bool       // the spares are in use, and no others are being made
}

// swap is one declared folder. Its store is a folder beside it, with copies under names that cannot be
// guessed: the source that was never handed out, the spare, and what the last tenant had until it is deleted.
type swap struct {
	path          string
	way           ancestors
	times         entry // of the folder above
	store         string
	stored        stamp
	want          fingerprint
	source, spare string
	old           string // "" if there is none
	known, fresh  proofs // of the folder, of the spare
	trusted       bool   // an unchanged change time proves that the content is unchanged
	exposed       bool   // tenants can list the store all the same, so nothing in it is trusted
}

func newSwaps(declared, scratch []string) (*swaps, error) {
	if len(declared) == 0 {
		return nil, errors.New("reset.paths: is empty: declare the folders that a task may write to")
	}
	s := &swaps{ready: make(chan error, 1)}
	for i, path := range declared {
		folder, err := newSwap(path, slices.Concat(scratch, declared[:i]))
		if err != nil {
			return nil, err
		}
		s.folders = append(s.folders, folder)
	}
	s.refill()
	// A swap of the fresh folders: what cannot work fails now, and every tenant gets a copy, the first too.
	if err := s.restore(0); err != nil {
		return nil, fmt.Errorf("reset.paths: %w", err)
	}
	if err := s.verify(false); err != nil {
		return nil, fmt.Errorf("reset.paths: a copy is not like the original: %w", err)
	}
	return s, nil
}

func newSwap(path string, others []string) (*swap, error) {
	way, err := declared("reset.paths", path, others)
	if err != nil {
		return nil, err
	}
	f := &swap{path: path, way: way, store: filepath.Join(filepath.Dir(path), storePrefix+filepath.Base(path))}
	if _, err := os.Lstat(f.store); err == nil {
		return nil, fmt.Errorf("reset.paths: %q was left by a daemon before this one, so %q may have been used: start from a fresh volume", f.store, path)
	}
	if err := f.fill(); err != nil {
		return nil, fmt.Errorf("reset.paths: %q cannot be copied beside itself: %w: the folder above must be writable, on the same file system, with room for two copies", path, err)
	}
	return f, nil
}

// fill makes the store and the source.
func (f *swap) fill() error {
	var above syscall.Stat_t
	if err := syscall.Lstat(filepath.Dir(f.path), &above); err != nil {
		return err
	}
	f.times = entry{accessed: above.Atim, modified: above.Mtim}
	if err := os.Mkdir(f.store, storeMode); err != nil {
		return err
	}
	if err := syscall.Chmod(f.store, storeMode); err != nil { // whatever the mask
		return err
	}
	_, err := os.ReadDir(f.store)
	f.exposed = err == nil
	if f.trusted, err = recordsStores(f.store); err != nil {
		return err
	}
	if f.source, err = f.newPlace(); err != nil {
		return err
	}
	if err := copyTree(f.path, f.source); err != nil {
		return err
	}
	if f.want, _, err = takeFingerprint(f.source); err != nil {
		return err
	}
	f.spare, err = f.newPlace()
	return err
}

// newPlace makes an empty folder in the store.
func (f *swap) newPlace() (string, error) {
	var name [16]byte
	_, _ = rand.Read(name[:])
	place := filepath.Join(f.store, hex.EncodeToString(name[:]))
	if err := os.Mkdir(place, 0o700); err != nil {
		return "", err
	}
	var err error
	f.stored, err = stampOf(f.store)
	return place, err
}

// refill makes the spares ready beside whatever runs.
func (s *swaps) refill() {
	go func() {
		var failure error
		for _, f := range s.folders {
			if err := f.makeSpare(); err != nil && failure == nil {
				failure = fmt.Errorf("the spare copy of %q: %w", f.path, err)
			}
		}
		s.ready <- failure
	}()
}

// makeSpare deletes what the last tenant left and fills the spare, which nobody knows yet.
func (f *swap) makeSpare() error {
	if err := f.dropOld(); err != nil {
		return err
	}
	if err := copyTree(f.source, f.spare); err != nil {
		return err
	}
	sleepTick()
	f.fresh = proofs{}
	return f.want.check(f.spare, f.fresh, false)
}

// dropOld empties the former tenant's folder. The folder itself goes at the next swap: until then nothing
// of ours changes the store.
func (f *swap) dropOld() error {
	if f.old == "" {
		return nil
	}
	ioctlFlags(f.old, setFlags, new(uint32))
	_ = os.Chmod(f.old, 0o700)
	return emptyOut(f.old)
}

func (s *swaps) restore(timeout time.Duration) error {
	if s.spent {
		return errors.New("paths: an earlier swap failed")
	}
	s.spent = true
	if err := s.await(timeout); err != nil {
		return err
	}
	for _, f := range s.folders {
		if err := f.swap(); err != nil {
			return fmt.Errorf("%q: %w", f.path, err)
		}
	}
	return nil
}

// await waits for the spares; a timeout of 0 is none.
func (s *swaps) await(timeout time.Duration) error {
	var late <-chan time.Time
	if timeout > 0 {
		late = time.After(timeout)
	}
	select {
	case err := <-s.ready:
		return err
	case <-late:
		return fmt.Errorf("no spare copy was ready after %v: raise reset.timeoutSeconds, or declare less", timeout)
	}
}

func (f *swap) swap() error {
	if now, err := stampOf(f.store); err != nil || now != f.stored {
		return fmt.Errorf("the folder %q of its copies was changed", f.store)
	}
	if err := f.way.verify(f.path); err != nil {
		return err
	}
	if f.old != "" {
		if err := os.Remove(f.old); err != nil {
			return err
		}
	}
	if err := takePlace(f.spare, f.path); err != nil {
		return err
	}
	f.known, f.old = f.fresh, f.spare
	if now, err := os.Lstat(f.old); err != nil || !now.IsDir() { // there was no folder, or no folder but a file
		_ = os.Remove(f.old)
		f.old = ""
	}
	if f.exposed && f.old != "" { // the next tenant could look into it
		if err := f.dropOld(); err != nil {
			return err
		}
		if err := os.Remove(f.old); err != nil {
			return err
		}
		f.old = ""
	}
	var err error
	if f.spare, err = f.newPlace(); err != nil {
		return err
	}
	_ = setTimes(filepath.Dir(f.path), f.times.accessed, f.times.modified) // who may not set them back could not set them either
	return nil
}

// takePlace puts a folder where another one is, or is no more, in one step: whoever is killed before or
// after it leaves one or the other. What was there is then in the folder's former place, if anything.
func takePlace(folder, path string) error {
	err := rename(folder, path, exchange)
	if errors.Is(err, syscall.EPERM) { // marked as not to be changed
		ioctlFlags(path, setFlags, new(uint32))
		err = rename(folder, path, exchange)
	}
	if errors.Is(err, syscall.EXDEV) { // a folder of the image below an overlay cannot be moved, only removed
		if err = removeTree(path); err == nil {
			err = syscall.ENOENT
		}
	}
	if errors.Is(err, syscall.ENOENT) {
		err = rename(folder, path, 0)
	}
	return err
}

func rename(from, to string, flags uintptr) error {
	source, err := syscall.BytePtrFromString(from)
	if err != nil {
		return err
	}
	target, err := syscall.BytePtrFromString(to)
	if err != nil {
		return err
	}
	here := atFdcwd
	_, _, errno := syscall.Syscall6(sysRenameat2, uintptr(here), uintptr(unsafe.Pointer(source)),
		uintptr(here), uintptr(unsafe.Pointer(target)), flags, 0)
	if errno != 0 {
		return &os.LinkError{Op: "rename", Old: from, New: to, Err: errno}
	}
	return nil
}

// verify finds what restore could not put back; then the next spares are made, beside the next lease.
// What a tenant cannot reach was read whole when it was made, beside the lease: only the rest is read again.
func (s *swaps) verify(bool) error {
	for _, f := range s.folders {
		if err := f.way.verify(f.path); err != nil {
			return err
		}
		if err := f.want.check(f.path, f.known, f.trusted && !f.exposed); err != nil {
			return err
		}
	}
	if s.spent {
		s.spent = false
		s.refill()
	}
	return nil
}

func (s *swaps) owned() (folders, changed []string) {
	for _, f := range s.folders {
		folders, changed = append(folders, f.path, f.store), append(changed, filepath.Dir(f.path))
	}
	return folders, changed
}
