// Package pristine says whether the sandbox is as it was at its start, and makes it so where that
// is cheap: scratch folders, message queues and SysV IPC are emptied, declared folders are put back by the
// method of reset, anything else is only found.
//
// Guarantees:
//  1. After a successful Restore and Verify, nothing that a former tenant wrote is readable.
//  2. Verify is the same for every method. It names the first difference; it repairs nothing but times of
//     declared files, and never skips what it cannot read.
//  3. Without a method the work is bounded by what was changed. With one, every entry that a tenant may write
//     to is looked at, and read only if its change time does not prove that it is unchanged.
//  4. A method that cannot work here is an error of Record, never of the first reset.
//
// Not here: killing (proc), who may ask for a reset (the server).
package pristine

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"
)

const (
	queues    = "/dev/mqueue"
	memory    = "/dev/shm"
	terminals = "/dev/pts"
	// maxUpperEntries bounds the walk: the upper holds a few mount points at start, and the first
	// entry more decides.
	maxUpperEntries = 4096
	// thoroughEvery is how many resets come to one that trusts no change time.
	thoroughEvery = 16
)

// Config is what a baseline is of.
type Config struct {
	Scratch []string // folders that are emptied; they must be empty
	Upper   string   // where writes to the root go, "" when it is read-only, or when Reset answers for it
	// OwnNetwork says that no other sandbox and no process outside uses the network devices.
	OwnNetwork bool
	Reset      *Reset // nil: nothing can be written but the upper and the scratch folders
	Run        Run
}

// Baseline is the state at start, against which every reset is measured.
type Baseline struct {
	scratch []string
	upper   string
	process Process
	network []byte // counters of the devices and the tables of sockets, nil if they are not the sandbox's alone
	started time.Time
	folders map[string]attrs
	changes map[string]stamp
	// terminals belong to whoever mounted them; their entries go with the processes that opened them.
	terminals map[string]attrs
	name      string // of the method
	why       string // nothing better than recreate works where nothing is declared
	method    method // nil where emptying scratch folders is all that can be done
	guard     *guard // nil without a method
	keyrings  *keyrings
	settings  settings
	timeout   time.Duration
	resets    int
}

// Record takes the baseline, and proves that the method of reset works here.
func Record(c Config) (*Baseline, error) {
	scratch, always := slices.Clone(c.Scratch), []string{queues}
	if c.Reset != nil {
		always = append(always, memory) // of a container, who has it without asking
	}
	for _, folder := range always {
		if _, err := os.Lstat(folder); err == nil && !slices.Contains(scratch, folder) {
			scratch = append(scratch, folder)
		}
	}
	b := &Baseline{scratch: scratch, upper: c.Upper, folders: map[string]attrs{}, started: time.Now(), name: overlay}
	var err error
	if b.process, err = RecordProcess(); err != nil {
		return nil, err
	}
	if c.OwnNetwork {
		if b.network, err = readNetwork(); err != nil {
			return nil, err
		}
	}
	b.terminals = map[string]attrs{}
	for _, path := range []string{terminals, terminals + "/ptmx"} {
		if now, err := readAttrs(path); err == nil { // a container need not have them
			b.terminals[path] = now
		}
	}
	b.settings = readSettings()
	if b.keyrings, err = openKeyrings(); err != nil {
		return nil, err
	}
	for _, folder := range scratch {
		if b.folders[folder], err = readAttrs(folder); err != nil {
			return nil, err
		}
		if err := empty(folder); err != nil {
			return nil, err
		}
	}
	if c.Reset != nil {
		if err := b.prepare(*c.Reset, isSealed(), c.Run); err != nil {
			return nil, err
		}
	}
	if c.Upper != "" {
		if b.changes, err = walkUpper(c.Upper); err != nil {
			return nil, err
		}
	}
	return b, nil
}

func (b *Baseline) prepare(r Reset, sealed bool, run Run) error {
	err := b.prove(r, sealed, run)
	switch {
	case r.Method == emptying || r.choose(b.upper, true) != emptying: // it is not what auto would take
		return err
	case !sealed:
		b.why = "the root is not read-only, and nothing is declared"
		return err
	case err != nil: // nobody asked for it
		b.name, b.method, b.guard, b.why = recreate, nil, nil, err.Error()
	}
	return nil
}

// prove makes the method ready, and with it the watch over what it does not answer for.
func (b *Baseline) prove(r Reset, sealed bool, run Run) error {
	mounts, err := readMounts()
	if err == nil && r.choose(b.upper, sealed) != recreate {
		err = seesQueues(mounts)
	}
	if err != nil {
		return err
	}
	if b.name, b.method, err = r.prepare(b.upper, sealed, b.scratch, run); err != nil || b.method == nil {
		return err
	}
	b.timeout = seconds(r.TimeoutSeconds)
	if err := b.clear(); err != nil { // the image's programs may have left something
		return err
	}
	folders, changed := b.method.owned()
	b.guard, err = newGuard(slices.Concat(b.scratch, folders), changed)
	return err
}

// isSealed says that the root cannot be written, so that a tenant is left with what is mounted.
func isSealed() bool {
	sealed := false
	mounts, err := readMounts()
	for _, m := range mounts { // the last one hides the others
		if m.place == "/" {
			sealed = !m.writable
		}
	}
	return err == nil && sealed
}

// Method is the name of the method of reset.
func (b *Baseline) Method() string { return b.name }

// Refused is why a method that auto would have taken does not work here.
func (b *Baseline) Refused() map[string]string {
	if b.why == "" {
		return nil
	}
	return map[string]string{emptying: b.why}
}

// Restore puts back what can be put back. Call it when no process but the daemon is left.
func (b *Baseline) Restore() error {
	b.resets++
	if b.name == recreate {
		return errors.New("reset: the method is recreate")
	}
	if err := b.clear(); err != nil || b.method == nil {
		return err
	}
	if err := b.method.restore(b.timeout); err != nil {
		return fmt.Errorf("%s: %w", b.name, err)
	}
	return b.clear() // of what the image's programs left
}

// clear empties what may be emptied.
func (b *Baseline) clear() error {
	for _, folder := range b.scratch {
		b.folders[folder].restore(folder)
		if err := emptyOut(folder); err != nil {
			return err
		}
		// A time is a message of 64 bits to the next tenant. Who may not set it back could not set it either: in
		// a container commands may run as another user than the one the folder belongs to.
		if err := os.Chtimes(folder, b.started, b.started); err != nil && !errors.Is(err, os.ErrPermission) {
			return fmt.Errorf("scratch: %w", err)
		}
	}
	for path, was := range b.terminals {
		was.restore(path)
		_ = os.Chtimes(path, b.started, b.started) // who may not set them back could not set them either
	}
	if b.guard != nil {
		if err := b.guard.restore(); err != nil {
			return err
		}
	}
	if err := b.keyrings.restore(); err != nil {
		return err
	}
	return removeIPC()
}

// Verify returns nil when the sandbox is as it was, else what differs. Every so often it reads everything.
func (b *Baseline) Verify() error {
	if err := b.process.Verify(); err != nil {
		return err
	}
	if err := b.verifyNetwork(); err != nil {
		return err
	}
	for _, folder := range b.scratch {
		now, err := readAttrs(folder)
		if err != nil {
			return err
		}
		if now != b.folders[folder] {
			return fmt.Errorf("scratch: mode, owner or attributes of %s were changed", folder)
		}
		if err := empty(folder); err != nil {
			return err
		}
	}
	for path, was := range b.terminals {
		if now, err := readAttrs(path); err != nil || now != was {
			return fmt.Errorf("terminals: mode or owner of %s were changed", path)
		}
	}
	if err := verifyIPC(); err != nil {
		return err
	}
	if err := b.keyrings.verify(); err != nil {
		return err
	}
	if err := b.settings.verify(); err != nil {
		return err
	}
	if err := b.verifyUpper(); err != nil || b.method == nil {
		return err
	}
	if err := b.guard.verify(); err != nil {
		return fmt.Errorf("undeclared: %w", err)
	}
	if err := b.method.verify(b.resets%thoroughEvery == 0); err != nil {
		return fmt.Errorf("%s: %w", b.name, err)
	}
	return nil
}

func (b *Baseline) verifyUpper() error {
	if b.upper == "" {
		return nil
	}
	now, err := walkUpper(b.upper)
	if err != nil {
		return fmt.Errorf("upper: %w", err)
	}
	// A write below a folder changes that folder too: name the deepest entry, which a person knows.
	changed := ""
	for name, stamp := range now {
		if was, known := b.changes[name]; (!known || was != stamp) && strings.Count(name, "/") >= strings.Count(changed, "/") {
			if changed == "" || strings.Count(name, "/") > strings.Count(changed, "/") || name < changed {
				changed = name
			}
		}
	}
	if changed != "" {
		return fmt.Errorf("upper: /%s was written", changed)
	}
	for name := range b.changes {
		if _, kept := now[name]; !kept {
			return fmt.Errorf("upper: /%s was removed", name)
		}
	}
	return nil
}

func empty(folder string) error {
	entries, err := os.ReadDir(folder)
	if err != nil {
		return err
	}
	if len(entries) > 0 {
		return fmt.Errorf("scratch: %s is not empty", filepath.Join(folder, entries[0].Name()))
	}
	return nil
}

// emptyOut removes what is in a folder, not the folder: it is a mount point.
func emptyOut(folder string) error {
	entries, err := os.ReadDir(folder)
	if err != nil {
		return err
	}
	for _, entry := range entries {
		path := filepath.Join(folder, entry.Name())
		if os.RemoveAll(path) == nil {
			continue
		}
		unlock(path)
		if err := os.RemoveAll(path); err != nil {
			return fmt.Errorf("scratch: %w", err)
		}
	}
	return nil
}

// unlock makes folders that the tenant closed to itself readable, and takes marks away: the daemon may have no
// capabilities either, it is only their owner.
func unlock(root string) {
	_ = filepath.WalkDir(root, func(path string, entry os.DirEntry, err error) error {
		if err != nil && entry != nil && entry.IsDir() {
			return filepath.SkipDir
		}
		if entry == nil {
			return nil
		}
		if entry.IsDir() || entry.Type().IsRegular() {
			ioctlFlags(path, setFlags, new(uint32))
		}
		if entry.IsDir() {
			_ = os.Chmod(path, 0o700)
		}
		return nil
	})
}
