package pristine

import (
	"bytes"
	"fmt"
	"os"
)

// Process is what a sandbox could do to a process outside of it, of the same machine: its mounts, and what it
// inherited.
type Process struct {
	mounts []byte
	inherited
}

// RecordProcess takes the state of this process.
func RecordProcess() (p Process, err error) {
	if p.mounts, err = os.ReadFile(mountTable); err != nil {
		return p, err
	}
	p.inherited, err = readInherited()
	return p, err
}

// Verify returns nil when this process is as it was, else what differs.
func (p Process) Verify() error {
	mounts, err := os.ReadFile(mountTable)
	if err != nil {
		return err
	}
	if !bytes.Equal(mounts, p.mounts) {
		return fmt.Errorf("mounts: the mount table differs from the one at start: %s", otherLine(p.mounts, mounts))
	}
	return p.inherited.verify()
}
