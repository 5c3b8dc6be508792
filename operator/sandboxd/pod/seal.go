package pod

const prNoNewPrivs = 38

// commandCaps are those of a container without the two that reach beyond it, NET_RAW and MKNOD: CHOWN, DAC_OVERRIDE,
// FOWNER, FSETID, KILL, SETGID, SETUID, SETPCAP, NET_BIND_SERVICE, SYS_CHROOT, AUDIT_WRITE, SETFCAP.
const commandCaps capabilities = 1<<0 | 1<<1 | 1<<3 | 1<<4 | 1<<5 | 1<<6 | 1<<7 | 1<<8 | 1<<10 | 1<<18 | 1<<29 | 1<<31

// seal takes from this process, and so from all that it will start, what commands are not to have. That nobody gains a
// privilege by an exec bounds them to what is left here: to lower the bounding set too would change nothing but take a
// call for each capability and thread, a fifth of the time of a reset.
func seal() error {
	sets, err := readCaps()
	if err != nil {
		return err
	}
	kept := sets.permitted & commandCaps
	if err := (capSets{effective: kept, permitted: kept}).set(); err != nil {
		return err
	}
	if err := prctl(prNoNewPrivs, 1); err != nil {
		return err
	}
	return filter()
}
