package main

import (
	"errors"
	"fmt"
	"net"
	"os"
	"syscall"
	"time"
)

// handoverTimeout bounds the owner's answer: it waits for this connection and answers at once.
const handoverTimeout = 10 * time.Second

// receive connects to a socket of the owner and takes over the descriptors that it sends: a listening
// socket, and behind it, where there is one, the file that counts out-of-memory kills. An engine that
// starts containers passes no descriptors; a socket of our own in a shared folder would mean a folder
// that commands can write to.
func receive(path string) (listener net.Listener, oom counter, err error) {
	conn, err := net.DialUnix("unix", nil, &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		return nil, counter{}, fmt.Errorf("--handover: %w", err)
	}
	defer conn.Close()
	_ = conn.SetDeadline(time.Now().Add(handoverTimeout))
	control := make([]byte, syscall.CmsgSpace(2*4))
	_, n, _, _, err := conn.ReadMsgUnix(make([]byte, 1), control)
	if err != nil {
		return nil, counter{}, fmt.Errorf("--handover: %w", err)
	}
	fds, err := descriptors(control[:n])
	if err != nil {
		return nil, counter{}, fmt.Errorf("--handover: %w", err)
	}
	if len(fds) > 1 {
		oom = openCounter(fds[1])
	}
	file := os.NewFile(uintptr(fds[0]), "listener")
	defer file.Close()
	listener, err = net.FileListener(file)
	return listener, oom, err
}

func descriptors(control []byte) ([]int, error) {
	messages, err := syscall.ParseSocketControlMessage(control)
	if err != nil {
		return nil, err
	}
	for _, message := range messages {
		if fds, err := syscall.ParseUnixRights(&message); err == nil && len(fds) > 0 {
			return fds, nil
		}
	}
	return nil, errors.New("the owner sent no descriptor")
}
