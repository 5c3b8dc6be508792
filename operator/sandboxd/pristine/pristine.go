// Package pristine says whether the sandbox is as it was at its start, and makes it so where that
// is cheap: scratch folders, message queues and SysV IPC are emptied, anything else is only found.
//
// Guarantees:
//  1. After a successful Restore and Verify, nothing that a former tenant wrote is readable.
//  2. Verify names the first difference; it never repairs, and never skips what it cannot read.
//  3. The work is bounded by what was changed, not by the size of the image.
package pristine

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

const (
	mountTable = "/proc/self/mountinfo"
	queues     = "/dev/mqueue"
	// maxUpperEntries bounds the walk: the upper holds a few mount points at start, and the first
	// entry more decides.
	maxUpperEntries = 4096
)

// Baseline is the state at start, against which every reset is measured.
type Baseline struct {
	scratch []string
	upper   string
	mounts  []byte
	folders map[string]attrs
	changes map[string]stamp
}

// Record takes the baseline. The scratch folders must be empty; upper may be "" for a sandbox
// whose root cannot be written.
func Record(scratch []string, upper string) (*Baseline, error) {
	if _, err := os.Lstat(queues); err == nil {
		scratch = append(slices.Clone(scratch), queues)
	}
	b := &Baseline{scratch: scratch, upper: upper, folders: map[string]attrs{}}
	var err error
	if b.mounts, err = os.ReadFile(mountTable); err != nil {
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
	if upper != "" {
		if b.changes, err = walkUpper(upper); err != nil {
			return nil, err
		}
	}
	return b, nil
}

// Restore empties what may be emptied. Call it when no process but the daemon is left.
func (b *Baseline) Restore() error {
	for _, folder := range b.scratch {
		b.folders[folder].restore(folder)
		if err := emptyOut(folder); err != nil {
			return err
		}
	}
	return removeIPC()
}

// Verify returns nil when the sandbox is as it was, else what differs.
func (b *Baseline) Verify() error {
	mounts, err := os.ReadFile(mountTable)
	if err != nil {
		return err
	}
	if !bytes.Equal(mounts, b.mounts) {
		return fmt.Errorf("mounts: the mount table differs from the one at start")
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
	if err := verifyIPC(); err != nil {
		return err
	}
	return b.verifyUpper()
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

// unlock makes folders that the tenant closed to itself readable: the daemon has no capabilities
// either, it is only their owner.
func unlock(root string) {
	_ = filepath.WalkDir(root, func(path string, entry os.DirEntry, err error) error {
		if err != nil && entry != nil && entry.IsDir() {
			return filepath.SkipDir
		}
		if entry != nil && entry.IsDir() {
			_ = os.Chmod(path, 0o700)
		}
		return nil
	})
}
